"""Statistics of the latencies of the last minutes."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sglang_coserve.core.control.slo import Statistic

_LEAST_S: Final = 1e-5
_MOST_S: Final = 1e4
"""Values beyond these count as these."""

_BINS_PER_E: Final = 100
"""Bins per factor of e. They are 1% wide, so a percentile is known to within 0.5%."""

_NUM_PARTS: Final = 8
"""Parts of the window. The oldest goes as a whole, so the window varies by an eighth."""

_QUANTILES: Final = MappingProxyType({Statistic.P50: 0.5, Statistic.P90: 0.9, Statistic.P99: 0.99})


def _bin(value_s: float) -> int:
    """Return where a value is counted: any number, and with the least none at all (NaN)."""
    return int(_BINS_PER_E * math.log(min(max(_LEAST_S, value_s), _MOST_S) / _LEAST_S))


def _no_bins() -> NDArray[np.int64]:
    return np.zeros(_bin(_MOST_S) + 1, dtype=np.int64)


@dataclass(slots=True)
class _Part:
    """The values of an eighth of the window."""

    begin_s: float
    bins: NDArray[np.int64] = field(default_factory=_no_bins)
    count: int = 0
    sum_s: float = 0.0


class RecentValues:
    """A histogram of the values of a window of time.

    It stores bins instead of values, so the window may hold many: a percentile that is determined
    by rare delays is known only after hundreds of them. Times must not decrease by more
    than an eighth of the window.
    """

    def __init__(self, window_s: float, *, at_least: int = 1) -> None:
        """Start empty; values older than ``window_s`` are forgotten, but for the last ``at_least``
        (to an eighth of the window)."""
        self._part_s = window_s / _NUM_PARTS
        self._at_least = at_least
        self._parts: deque[_Part] = deque()
        self._bins = _no_bins()
        """Of all parts."""

        self.count = 0
        """Number of values that are not forgotten."""

    def add(self, value_s: float, now_s: float, count: int = 1) -> None:
        """Add a value ``count`` times. Amortized O(1)."""
        if not self._parts or now_s >= self._parts[-1].begin_s + self._part_s:
            self._begin_part(now_s)
        part = self._parts[-1]
        found = _bin(value_s)
        part.bins[found] += count
        self._bins[found] += count
        part.sum_s += count * value_s
        part.count += count
        self.count += count

    def statistic(self, statistic: Statistic) -> float:
        """Return a statistic in seconds; not to be called while empty. O(bins) for a percentile."""
        if statistic is Statistic.MEAN:
            return sum(part.sum_s for part in self._parts) / self.count
        return self.quantile(_QUANTILES[statistic])

    def quantile(self, share: float) -> float:
        """Return the least value that ``share`` of the values do not exceed. O(bins)."""
        found = int(np.searchsorted(np.cumsum(self._bins), share * self.count))
        return _LEAST_S * math.exp((found + 0.5) / _BINS_PER_E)

    def _begin_part(self, now_s: float) -> None:
        first_s = now_s - self._part_s * (_NUM_PARTS - 1)
        while (
            self._parts
            and self._parts[0].begin_s < first_s
            and self.count - self._parts[0].count >= self._at_least
        ):
            gone = self._parts.popleft()
            self.count -= gone.count
            self._bins -= gone.bins
        self._parts.append(_Part(now_s))
