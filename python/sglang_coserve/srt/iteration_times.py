"""How long iterations took, told from the times of the scheduling passes around them."""

from __future__ import annotations

from collections import deque

from sglang_coserve.core.batch_stats import BatchStats

__all__ = ["IterationTimes"]


class IterationTimes:
    """Matches the time between two passes with the batch that ran in it.

    Without overlap, and on a CPU in any case, a pass's batch runs until the next
    pass. Where the batch runs beside the scheduler, a pass ends when the batch
    *before* it has: the time then belongs to that one.
    """

    def __init__(self, *, is_overlapped: bool) -> None:
        self._lag = int(is_overlapped)
        self._launched: deque[BatchStats | None] = deque(maxlen=self._lag + 1)
        self._pass_s: float | None = None

    def next_pass(self, now_s: float) -> tuple[BatchStats, float] | None:
        """Return the batch whose time the past pass shows, with that time; None if unknown.

        To be followed by ``launched`` once the pass has its batch.
        """
        started_s, self._pass_s = self._pass_s, now_s
        if started_s is None or len(self._launched) <= self._lag:
            return None
        stats = self._launched[0]
        # Beside a batch of unknown length the time is not this one's alone.
        if stats is None or self._launched[-1] is None or stats.is_empty or now_s <= started_s:
            return None
        return stats, now_s - started_s

    def launched(self, stats: BatchStats | None) -> None:
        """Note the batch of a pass; None when it is not known, or there is none."""
        self._launched.append(stats)
