"""Counts tokens that are computed twice: the recompute tax of retraction."""

from __future__ import annotations

from collections import Counter

from sglang_coserve.core.request import RequestClass
from sglang_coserve.srt.steps.step_record import StepRecord


class RecomputeMeter:
    """Sums of computed and of recomputed tokens by class, since the start."""

    def __init__(self) -> None:
        self._computed_tokens: Counter[RequestClass] = Counter()
        self._recomputed_tokens: Counter[RequestClass] = Counter()

    def ended(self, record: StepRecord) -> None:
        """Count a step. O(its requests)."""
        if record.is_dropped:
            return
        # A decode computes one token.
        self._computed_tokens[RequestClass.ONLINE] += len(record.online)
        self._computed_tokens[RequestClass.OFFLINE] += len(record.offline)
        for request in record.prompts:
            request_class = request.info.request_class
            self._computed_tokens[request_class] += request.prompt_tokens - 1
            self._recomputed_tokens[request_class] += request.recomputed_tokens

    def state(self) -> dict[str, dict[str, float]]:
        """Return what ``/coserve/status`` says of each class (docs/metrics.md). O(1)."""
        return {
            request_class.value: {
                "computed_tokens": (computed := self._computed_tokens[request_class]),
                "recomputed_tokens": (again := self._recomputed_tokens[request_class]),
                "tax": again / computed if computed else 0.0,
            }
            for request_class in RequestClass
        }
