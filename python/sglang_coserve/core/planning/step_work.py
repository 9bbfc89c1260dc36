"""The work of a step that is being planned: sums over its batch, and how long it will take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step_stats import StepStats

__all__ = ["StepWork"]


class StepWork:
    """Sums up the prefills and decodes of one step, and predicts its latency with more of them."""

    def __init__(self, model: LatencyModel) -> None:
        """Start without work."""
        self._model = model
        # The sums, and the prefills not yet included in them: adding many at once is much cheaper
        # than creating a StepStats for each.
        self._stats = StepStats()
        self._pending: list[tuple[int, int]] = []
        self._predicted_s: float | None = 0.0
        self._probe: tuple[int, int, StepStats, float] | None = None

    @property
    def stats(self) -> StepStats:
        """Sums over the batch so far."""
        if self._pending:
            self._stats = _with_prefills(self._stats, self._pending)
            self._pending = []
        return self._stats

    @property
    def predicted_s(self) -> float:
        """Predicted latency of the batch so far."""
        if self._predicted_s is None:
            self._predicted_s = self._model.predict(self.stats)
        return self._predicted_s

    def add_decodes(self, requests: Sequence[Request]) -> None:
        """Add one token of each request. O(requests)."""
        self._stats = self._with_decodes(
            len(requests), sum([request.computed_tokens for request in requests])
        )
        self._predicted_s = self._probe = None

    def add_prefill(self, tokens: int, context_tokens: int) -> None:
        """Add ``tokens`` prompt tokens of one request, after ``context_tokens``."""
        probe = self._probe
        if probe is not None and probe[0] == tokens and probe[1] == context_tokens:
            _, _, self._stats, self._predicted_s = probe
        else:
            self._pending.append((tokens, context_tokens))
            self._predicted_s = None
        self._probe = None

    def predict_with_decodes(self, count: int, context_tokens: int) -> float:
        """Return the latency in seconds with ``count`` more decodes, whose contexts sum up to
        ``context_tokens``."""
        return self._model.predict(self._with_decodes(count, context_tokens))

    def predict_with_prefill(self, tokens: int, context_tokens: int) -> float:
        """Return the latency with one more prefill request; the sums are kept for
        ``add_prefill``."""
        stats = self.stats.with_prefill(tokens, context_tokens)
        seconds = self._model.predict(stats)
        self._probe = (tokens, context_tokens, stats, seconds)
        return seconds

    def predict_with_whole(self, requests: Iterable[Request], max_tokens: int) -> float:
        """Return the latency with the whole prompts of all requests; infinite if they have more
        than ``max_tokens``.

        O(requests), and at most O(max_tokens).
        """
        left_tokens = max_tokens
        prefills = []
        for request in requests:
            tokens = request.tokens_to_compute
            left_tokens -= tokens
            if left_tokens < 0:
                return math.inf
            prefills.append((tokens, request.computed_tokens or request.cached_tokens))
        return self._model.predict(_with_prefills(self.stats, prefills))

    def _with_decodes(self, count: int, context_tokens: int) -> StepStats:
        stats = self.stats
        return StepStats(
            stats.prefill_requests,
            stats.prefill_tokens,
            stats.prefill_context_tokens,
            stats.prefill_attention_pairs,
            stats.decode_requests + count,
            stats.decode_context_tokens + context_tokens + count,
        )


def _with_prefills(stats: StepStats, prefills: Iterable[tuple[int, int]]) -> StepStats:
    requests, tokens, context_tokens, pairs = (
        stats.prefill_requests,
        stats.prefill_tokens,
        stats.prefill_context_tokens,
        stats.prefill_attention_pairs,
    )
    for more, context in prefills:
        requests += 1
        tokens += more
        context_tokens += context
        pairs += more * (more + context)
    return StepStats(
        requests, tokens, context_tokens, pairs, stats.decode_requests, stats.decode_context_tokens
    )
