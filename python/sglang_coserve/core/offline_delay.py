"""How much later online tokens came because offline work ran in the same iterations."""

from __future__ import annotations

from array import array
from bisect import bisect_right

__all__ = ["OfflineDelay"]


class OfflineDelay:
    """The time that offline work has added, as a function of the clock.

    An iteration with offline rows adds what it took longer than its online rows
    alone would have. The delay grows evenly through the iteration, because a request
    that arrives halfway waits for the second half only. A latency less the delay
    between its two ends is what online requests reach alone. That is an upper
    estimate: truly alone, fewer of them would run at the same time.
    """

    def __init__(self, min_iterations: int = 1 << 16) -> None:
        """Start without iterations.

        Args:
            min_iterations: how many of the last ones to remember; up to twice as many are, in
                24 bytes each. By default half an hour of 30 ms each.
        """
        self._min_iterations = min_iterations
        self._starts_s = array("d")
        self._ends_s = array("d")
        self._befores_s = array("d")
        """The total before each iteration."""

        self._total_s = 0.0
        self._last_answer = (0.0, 0.0, 0.0)

    def add(self, start_s: float, end_s: float, delay_s: float) -> None:
        """Take an iteration into account that ended after all others. O(1) amortized.

        Args:
            start_s: when it began; no time counts twice, so not before the end of the last one.
            end_s: when it ended.
            delay_s: the part of it due to offline work.
        """
        if self._ends_s:
            start_s = max(start_s, self._ends_s[-1])
        delay_s = min(delay_s, end_s - start_s)
        if delay_s <= 0:
            return
        if len(self._starts_s) == 2 * self._min_iterations:
            for column in (self._starts_s, self._ends_s, self._befores_s):
                del column[: self._min_iterations]
        self._starts_s.append(start_s)
        self._ends_s.append(end_s)
        self._befores_s.append(self._total_s)
        self._total_s += delay_s
        self._last_answer = (0.0, 0.0, 0.0)

    def between(self, start_s: float, end_s: float) -> float:
        """Return the delay that fell between two times; no longer than that. O(log iterations)."""
        # The rows of one iteration all ask the same.
        last_start_s, last_end_s, delay_s = self._last_answer
        if start_s != last_start_s or end_s != last_end_s:
            delay_s = self._until(end_s) - self._until(start_s)
            delay_s = min(max(delay_s, 0.0), end_s - start_s)
            self._last_answer = (start_s, end_s, delay_s)
        return delay_s

    def _until(self, time_s: float) -> float:
        index = bisect_right(self._starts_s, time_s) - 1
        if index < 0:
            return self._befores_s[0] if self._befores_s else 0.0
        start_s, end_s = self._starts_s[index], self._ends_s[index]
        before_s = self._befores_s[index]
        is_last = index + 1 == len(self._befores_s)
        after_s = self._total_s if is_last else self._befores_s[index + 1]
        if time_s >= end_s:
            return after_s
        return before_s + (after_s - before_s) * (time_s - start_s) / (end_s - start_s)
