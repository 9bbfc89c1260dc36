"""Statistics of the latencies of the last minutes."""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Mapping
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
        value_s = _within_range(value_s)
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
        return _quantile(self._bins, share * self.count)

    def _count(self, added: _Added, sign: int) -> None:
        count = sign * added.num_values
        self._bins[_bin(added.value_s)] += count
        self._sum_s += added.value_s * count
        self.count += count


_SLICES: Final = 60


class SlicedValues:
    """A histogram of a window of time in bounded memory, at any number of values a second.

    All values of a slice, a sixtieth of the window, are forgotten together.
    """

    def __init__(self, window_s: float) -> None:
        """Start empty."""
        self._slice_s = window_s / _SLICES
        self._slices: deque[tuple[int, Counter[int]]] = deque()
        """Number and bins of each slice with values, in order. The number is the time in slices."""

        self._ends_s = -math.inf
        """End of the last slice."""

        self._older = Counter[int]()
        """Sums over all slices but the last."""

    def add(self, value_s: float, now_s: float, count: int = 1) -> None:
        """Add a value ``count`` times. O(1), and O(bins) in a new slice.

        A value that is older than the last slice counts as of that slice.
        """
        if now_s >= self._ends_s:
            self._begin(self._number(now_s))
        self._slices[-1][1][_bin(_within_range(value_s))] += count

    def read(self, now_s: float, *shares: float) -> tuple[int, tuple[float, ...]]:
        """Return the number of values, and for each of ``shares`` the least value that this share
        of the values do not exceed; no quantiles without values. O(bins log bins)."""
        number = self._number(now_s)
        self._forget(number)
        bins = dict(self._older)
        if self._slices and self._slices[-1][0] > number - _SLICES:
            for found, count in self._slices[-1][1].items():
                bins[found] = bins.get(found, 0) + count
        total = sum(bins.values())
        return total, tuple(_quantile(bins, share * total) for share in shares) if total else ()

    def _number(self, now_s: float) -> int:
        return math.floor(now_s / self._slice_s)

    def _begin(self, number: int) -> None:
        if self._slices:
            self._older += self._slices[-1][1]
        self._slices.append((number, Counter()))
        self._ends_s = (number + 1) * self._slice_s
        self._forget(number)

    def _forget(self, number: int) -> None:
        while len(self._slices) > 1 and self._slices[0][0] <= number - _SLICES:
            self._older -= self._slices.popleft()[1]


def _within_range(value_s: float) -> float:
    return min(max(sys.float_info.min, value_s), _LARGEST_S)


def _bin(value_s: float) -> int:
    return math.floor(_BINS_PER_E * math.log(value_s))


def _quantile(bins: Mapping[int, int], rank: float) -> float:
    """Return the least value that ``rank`` of the values in ``bins`` do not exceed."""
    left = rank
    for found in sorted(bins):
        left -= bins[found]
        if left <= 0:
            break
    return math.inf if found == _bin(_LARGEST_S) else math.exp((found + 0.5) / _BINS_PER_E)
