"""How long a batch can take at most, from those that were measured."""

from __future__ import annotations

from sglang_coserve.core.batch_stats import BatchStats

__all__ = ["CostBound"]


class CostBound:
    """An upper bound that needs no fit.

    If the time is a sum of works with unknown prices that are not negative
    (the polynomial: ΣP, ΣP·(P + C), Σ(P + C) and a constant), a batch takes at
    most as many times longer than another as its largest ratio of works.
    """

    def __init__(self) -> None:
        self._measured: list[tuple[tuple[float, ...], float]] = []

    def observe(self, batch: BatchStats, seconds: float) -> None:
        """Remember a measured batch."""
        self._measured.append((_works(batch), seconds))

    def seconds(self, batch: BatchStats) -> float:
        """Return the least bound; 0 before anything was observed. O(observations)."""
        works = _works(batch)
        return min(
            (
                seconds * max(work / known for work, known in zip(works, measured, strict=True))
                for measured, seconds in self._measured
            ),
            default=0.0,
        )


def _works(batch: BatchStats) -> tuple[float, ...]:
    return (1.0, batch.compute_tokens, batch.attention_pairs, batch.total_tokens)
