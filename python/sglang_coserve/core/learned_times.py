"""Times and rates that a scheduler learns while it serves.

How long an offline request runs, and how fast offline work is on an otherwise idle engine.
"""

from __future__ import annotations

from typing import Final

from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.offline_queue import QueuedRequest
from sglang_coserve.core.step import StepResult
from sglang_coserve.core.step_stats import StepStats

_SERVICE_WEIGHT: Final = 1 / 200
"""Weight of one step in the moving average, the same as for prediction errors."""


class MovingMean:
    """A mean in which a new value has at least a given weight, and at first that of a plain mean,
    so that one early outlier does not weigh for long."""

    def __init__(self, least_weight: float) -> None:
        self._least_weight = least_weight
        self.count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        """Take one more value into account. O(1)."""
        self.count += 1
        self.value += max(self._least_weight, 1 / self.count) * (value - self.value)


class ServiceTime:
    """Predicts the time from the start of an offline request to its end.

    It is the time of the prefill plus, for each output token, the time from one step with
    offline decodes to the next. The latter is measured, so it includes online work in between;
    until two such steps were seen, it is the predicted time of a single decode.
    """

    def __init__(self) -> None:
        self._token_s = MovingMean(_SERVICE_WEIGHT)
        self._last_s: float | None = None

    def observe(self, result: StepResult, *, is_busy: bool) -> None:
        """Record the result of a step. O(online requests of the step).

        ``is_busy``: offline requests are running. Time without any does not count as time per
        token.
        """
        if not is_busy:
            self._last_s = None
            return
        if result.batch.decode_requests <= result.num_online_decodes:
            return
        end_s = result.started_s + (result.seconds or 0.0)
        if self._last_s is not None and end_s > self._last_s:
            # In a pipeline the preceding step belongs to another micro-batch.
            self._token_s.add((end_s - self._last_s) * result.concurrency)
        self._last_s = end_s

    def predict(self, request: QueuedRequest, model: LatencyModel) -> float:
        """Return the predicted seconds of ``request`` from its next start to its end."""
        length_tokens = request.num_prompt_tokens + request.num_generated_tokens
        prefill_s = model.predict(StepStats().with_prefill(length_tokens, 0))
        token_s = self._token_s.value
        if not self._token_s.count:
            token_s = model.predict(StepStats().with_decode(length_tokens))
        return prefill_s + request.expected_tokens_left * token_s


_SHAPE_WEIGHT: Final = 1 / 64
"""Weight of one request in the mean lengths of offline requests."""


class OfflineShape:
    """Mean lengths of the last offline requests."""

    def __init__(self) -> None:
        self._started = self._computed_tokens = 0.0
        self._output_tokens = MovingMean(_SHAPE_WEIGHT)

    def started(self) -> None:
        """Record that an offline request was admitted."""
        keep = 1 - _SHAPE_WEIGHT
        self._started = keep * self._started + 1
        self._computed_tokens *= keep

    def computed(self, result: StepResult) -> None:
        """Record the offline prompt tokens of a step. O(online requests of the step)."""
        online_tokens = sum(tokens for _, tokens in result.online_chunks)
        self._computed_tokens += result.batch.prefill_tokens - online_tokens

    def ended(self, output_tokens: int) -> None:
        """Record that an offline request has ended with so many output tokens."""
        self._output_tokens.add(output_tokens)

    def mean_tokens(self, next_request: QueuedRequest) -> tuple[float, float]:
        """Return the mean computed tokens of a prompt, and of an output.

        Unknown means are the lengths that ``next_request`` is expected to have.
        """
        prompt_tokens = float(next_request.num_prompt_tokens)
        if self._output_tokens.count:
            prompt_tokens = self._computed_tokens / self._started
        output_tokens = float(next_request.expected_tokens_left)
        if self._output_tokens.count:
            output_tokens = self._output_tokens.value
        return prompt_tokens, output_tokens


_PROMPT_TOKENS: Final = 256
_OUTPUT_TOKENS: Final = 256
"""Assumed lengths, as no request has been seen yet."""


def expected_tokens_per_s(
    model: LatencyModel, *, kv_tokens: int, max_requests: int, chunk_tokens: int
) -> float:
    """Return the predicted prompt and output tokens per second of many medium-sized requests.

    As many of them decode together as ``kv_tokens`` and ``max_requests`` allow, and prompts
    are computed in batches of ``chunk_tokens``. This is the initial estimate of a rate that is
    measured once requests are served.
    """
    requests = max(1, min(max_requests, kv_tokens // (_PROMPT_TOKENS + _OUTPUT_TOKENS)))
    prompts = max(1, min(requests, chunk_tokens // _PROMPT_TOKENS))
    prefill_s = model.predict(StepStats.of(prefills=[(_PROMPT_TOKENS, 0)] * prompts)) / prompts
    middle_tokens = _PROMPT_TOKENS + _OUTPUT_TOKENS // 2
    decode_s = model.predict(StepStats.of(decodes=[middle_tokens] * requests)) / requests
    return (_PROMPT_TOKENS + _OUTPUT_TOKENS) / (prefill_s + _OUTPUT_TOKENS * decode_s)


def lines_at_a_time(*, kv_tokens: int, requests: int, lines: int, line_tokens: int) -> int:
    """Return how many offline requests fit into ``kv_tokens`` of KV and so many requests.

    Their mean length is that of the ``lines`` that are there: ``line_tokens`` of prompts and
    outputs together. Without any a medium length is assumed.
    """
    if not line_tokens:
        lines, line_tokens = 1, _PROMPT_TOKENS + _OUTPUT_TOKENS
    return max(0, min(requests, kv_tokens * lines // line_tokens))
