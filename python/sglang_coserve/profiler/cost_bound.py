"""Bounds the time of a batch from above, given the batches measured so far."""

from __future__ import annotations

import math

from sglang_coserve.core.step_stats import StepStats

__all__ = ["CostBound"]


class CostBound:
    """An upper bound on the time of a batch that needs no fit.

    Assume that the time is a sum of features (those of the polynomial model: tokens, attention,
    context, requests and a constant) with unknown non-negative coefficients.
    Then the ratio of the times of two batches is at most the largest ratio of their
    features. A batch with a kind of requests that the other lacks is not bounded
    by it.
    """

    def __init__(self) -> None:
        self._measured: list[tuple[tuple[float, ...], float]] = []

    def observe(self, batch: StepStats, seconds: float) -> None:
        """Add a measured batch."""
        self._measured.append((_works(batch), seconds))

    def seconds(self, batch: StepStats) -> float:
        """Return the least bound; 0 if no observed batch bounds this one. O(observations)."""
        works = _works(batch)
        bound_s = min(
            (seconds * max(map(_ratio, works, measured)) for measured, seconds in self._measured),
            default=math.inf,
        )
        return bound_s if bound_s < math.inf else 0.0


def _works(batch: StepStats) -> tuple[float, ...]:
    return (
        1.0,
        batch.compute_tokens,
        batch.attention_pairs,
        batch.total_tokens,
        batch.prefill_requests,
        batch.decode_requests,
    )


def _ratio(work: float, measured: float) -> float:
    if measured:
        return work / measured
    return math.inf if work else 0.0
