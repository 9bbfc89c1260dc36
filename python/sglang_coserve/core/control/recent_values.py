"""Statistics of recent latencies, exponentially weighted."""

from __future__ import annotations

import math
from array import array
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sglang_coserve.core.control.slo import Statistic

__all__ = ["RecentValues"]

_LEAST_S: Final = 1e-5
_BINS_PER_E: Final = 100
"""Bins per factor of e. They are 1% wide, so a percentile is known to within 0.5%."""

_NUM_BINS: Final = 2048
"""Covers latencies of up to 2 h."""

_LARGEST_WEIGHT: Final = 1e12

_QUANTILES: Final = MappingProxyType({Statistic.P50: 0.5, Statistic.P90: 0.9, Statistic.P99: 0.99})


class RecentValues:
    """A histogram in which each value weighs slightly more than the one before it.

    It stores bins instead of values, so its span may be large: a percentile that is determined
    by rare delays is known only after hundreds of them.
    """

    def __init__(self, span: int) -> None:
        """Start empty; a value's relative weight decays to 1/e after ``span`` more values."""
        self._weights = array("d", bytes(8 * _NUM_BINS))
        self._growth = math.log1p(1 / span)
        self._weight = 1.0
        self._sum_s = 0.0
        self._total = 0.0

    def add(self, value_s: float, count: int = 1) -> None:
        """Add a value ``count`` times. Amortized O(1)."""
        weight = count * self._weight
        self._weights[_bin(value_s)] += weight
        self._sum_s += weight * value_s
        self._total += weight
        self._weight *= math.exp(count * self._growth)
        if self._weight > _LARGEST_WEIGHT:
            largest = self._weight
            self._seen()[:] /= largest
            self._sum_s /= largest
            self._total /= largest
            self._weight = 1.0

    def statistic(self, statistic: Statistic) -> float:
        """Return a statistic in seconds; not to be called while empty. O(bins) for a percentile."""
        if statistic is Statistic.MEAN:
            return self._sum_s / self._total
        sums = np.cumsum(self._seen())
        found = int(np.searchsorted(sums, _QUANTILES[statistic] * sums[-1]))
        return _LEAST_S * math.exp((found + 0.5) / _BINS_PER_E)

    def share_above(self, value_s: float) -> float:
        """Return the share of values above ``value_s``; not to be called while empty. O(bins)."""
        weights = self._seen()
        return float(weights[_bin(value_s) + 1 :].sum() / weights.sum())

    def _seen(self) -> NDArray[np.float64]:
        return np.frombuffer(self._weights)


def _bin(value_s: float) -> int:
    if value_s <= _LEAST_S:
        return 0
    return min(int(_BINS_PER_E * math.log(value_s / _LEAST_S)), _NUM_BINS - 1)
