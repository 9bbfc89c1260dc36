"""How long an offline request will run."""

from __future__ import annotations

from typing import Final

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.offline_queue import QueuedRequest
from sglang_coserve.core.step import StepResult

__all__ = ["ServiceTime"]

_WEIGHT: Final = 1 / 200
"""Of one step in the moving mean, as for the error of predictions."""


class ServiceTime:
    """Predicts the time from an offline request's start to its end.

    That is the time of its prefill, and for each output token the time from one step with
    offline decodes to the next. The latter is measured, so it includes what online work takes
    in between; before there are two such steps it is the predicted one of a decode alone.
    """

    def __init__(self) -> None:
        self._count = 0
        self._token_s = 0.0
        self._last_s: float | None = None

    def observe(self, result: StepResult, *, is_busy: bool) -> None:
        """Note what came of a step. O(online rows of it).

        ``is_busy`` tells whether offline requests run: the time without any is no wait for
        a token.
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
            # In a pipeline the step before was another micro-batch's.
            token_s = (end_s - self._last_s) * result.concurrency
            self._token_s += weight * (token_s - self._token_s)
        self._last_s = end_s

    def predict(self, request: QueuedRequest, model: LatencyModel) -> float:
        """Return the seconds that ``request`` takes from its next start to its end."""
        length_tokens = request.num_prompt_tokens + request.num_generated_tokens
        prefill_s = model.predict(BatchStats().with_prefill(length_tokens, 0))
        token_s = self._token_s
        if not self._count:
            token_s = model.predict(BatchStats().with_decode(length_tokens))
        return prefill_s + request.expected_tokens_left * token_s


def _decodes_offline(result: StepResult) -> bool:
    prefilled = {chunk.rid for chunk in result.chunks}
    online_decodes = sum(served.info.rid not in prefilled for served in result.served)
    return result.batch.decode_requests > online_decodes
