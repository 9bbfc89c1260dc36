"""Statistics of the latencies of the last minutes."""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from types import MappingProxyType
from typing import Final, NamedTuple

from sglang_coserve.core.control.slo import Statistic

_BINS_PER_E: Final = 100
"""Bins per factor of e. They are 1% wide, so a percentile is known to within 0.5%."""

_LARGEST_S: Final = sys.float_info.max / 2

_QUANTILES: Final = MappingProxyType({Statistic.P50: 0.5, Statistic.P90: 0.9, Statistic.P99: 0.99})


class _Added(NamedTuple):
    at_s: float
    value_s: float
    num_values: int


class RecentValues:
    """A histogram of the values of a window of time.

    Percentiles come from bins: one that is determined by rare delays is known only after hundreds
    of values.
    """

    def __init__(self, window_s: float, *, at_least: int = 1) -> None:
        """Start empty; values older than ``window_s`` are forgotten, but for the last
        ``at_least``."""
        self._window_s = window_s
        self._at_least = at_least
        self._added: deque[_Added] = deque()
        self._bins: Counter[int] = Counter()
        self._sum_s = 0.0
        self.count = 0
        """Number of values that are not forgotten."""

    def add(self, value_s: float, now_s: float, count: int = 1) -> None:
        """Add a value ``count`` times. Amortized O(1).

        No number, 0 and less count as the least float above 0; in the mean, infinity counts as a
        very large one.
        """
        value_s = min(max(sys.float_info.min, value_s), _LARGEST_S)
        self._added.append(_Added(now_s, value_s, count))
        self._count(self._added[-1], 1)
        while (oldest := self._added[0]).at_s <= now_s - self._window_s:
            if self.count - oldest.num_values < self._at_least:
                break
            self._count(self._added.popleft(), -1)

    def statistic(self, statistic: Statistic) -> float:
        """Return a statistic in seconds; not to be called while empty."""
        if statistic is Statistic.MEAN:
            return self._sum_s / self.count
        return self.quantile(_QUANTILES[statistic])

    def quantile(self, share: float) -> float:
        """Return the least value that ``share`` of the values do not exceed. O(bins log bins)."""
        left = share * self.count
        for found in sorted(self._bins):
            left -= self._bins[found]
            if left <= 0:
                break
        return math.inf if found == _bin(_LARGEST_S) else math.exp((found + 0.5) / _BINS_PER_E)

    def _count(self, added: _Added, sign: int) -> None:
        count = sign * added.num_values
        self._bins[_bin(added.value_s)] += count
        self._sum_s += added.value_s * count
        self.count += count


def _bin(value_s: float) -> int:
    return math.floor(_BINS_PER_E * math.log(value_s))
