"""Predicts how long an offline request will run."""

from __future__ import annotations

from typing import Final

from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.offline_queue import QueuedRequest
from sglang_coserve.core.step import StepResult
from sglang_coserve.core.step_stats import StepStats

__all__ = ["ServiceTime"]

_WEIGHT: Final = 1 / 200
"""Weight of one step in the moving average, the same as for prediction errors."""


class ServiceTime:
    """Predicts the time from the start of an offline request to its end.

    It is the time of the prefill plus, for each output token, the time from one step with
    offline decodes to the next. The latter is measured, so it includes online work in between;
    until two such steps were seen, it is the predicted time of a single decode.
    """

    def __init__(self) -> None:
        self._count = 0
        self._token_s = 0.0
        self._last_s: float | None = None

    def observe(self, result: StepResult, *, is_busy: bool) -> None:
        """Record the result of a step. O(online requests of the step).

        ``is_busy``: offline requests are running. Time without any does not count as time per
        token.
        """
        if not is_busy:
            self._last_s = None
            return
        if not _decodes_offline(result):
            return
        end_s = result.started_s + (result.seconds or 0.0)
        if self._last_s is not None and end_s > self._last_s:
            self._count += 1
            weight = max(_WEIGHT, 1 / self._count)
            # In a pipeline the preceding step belongs to another micro-batch.
            token_s = (end_s - self._last_s) * result.concurrency
            self._token_s += weight * (token_s - self._token_s)
        self._last_s = end_s

    def predict(self, request: QueuedRequest, model: LatencyModel) -> float:
        """Return the predicted seconds of ``request`` from its next start to its end."""
        length_tokens = request.num_prompt_tokens + request.num_generated_tokens
        prefill_s = model.predict(StepStats().with_prefill(length_tokens, 0))
        token_s = self._token_s
        if not self._count:
            token_s = model.predict(StepStats().with_decode(length_tokens))
        return prefill_s + request.expected_tokens_left * token_s


def _decodes_offline(result: StepResult) -> bool:
    online_decodes = len(result.served) - len(result.online_chunks)
    return result.batch.decode_requests > online_decodes
