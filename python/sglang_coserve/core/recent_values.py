"""Statistics of latencies, the recent ones counting most."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sglang_coserve.core.slo import Statistic

__all__ = ["RecentValues"]

_LEAST_S: Final = 1e-5
_BINS_PER_E: Final = 100
"""Bins are 1% wide, so that a percentile is known to half of that."""

_NUM_BINS: Final = 2048
"""Up to 2 h."""

_LARGEST_WEIGHT: Final = 1e12

_QUANTILES: Final = MappingProxyType({Statistic.P50: 0.5, Statistic.P90: 0.9, Statistic.P99: 0.99})


class RecentValues:
    """A histogram in which each value weighs a little more than the one before.

    It keeps no value, so it may span many: where a percentile lies among rare delays, it takes
    hundreds of these to know it.
    """

    def __init__(self, span: int) -> None:
        """Start empty; ``span`` values later, a value weighs 1/e of what it did."""
        self._weights = array("d", bytes(8 * _NUM_BINS))
        self._growth = 1 + 1 / span
        self._weight = 1.0
        self._sum_s = 0.0
        self._total = 0.0

    def add(self, values_s: Iterable[float]) -> None:
        """Take in values. O(1) each."""
        weights, weight, growth = self._weights, self._weight, self._growth
        for value_s in values_s:
            weights[_bin(value_s)] += weight
            self._sum_s += weight * value_s
            self._total += weight
            weight *= growth
        self._weight = weight
        if weight > _LARGEST_WEIGHT:
            self._seen()[:] /= weight
            self._sum_s /= weight
            self._total /= weight
            self._weight = 1.0

    def statistic(self, statistic: Statistic) -> float:
        """Return a statistic; there must be a value. O(bins) for a percentile."""
        if statistic is Statistic.MEAN:
            return self._sum_s / self._total
        sums = np.cumsum(self._seen())
        found = int(np.searchsorted(sums, _QUANTILES[statistic] * sums[-1]))
        return _LEAST_S * math.exp((found + 0.5) / _BINS_PER_E)

    def share_above(self, value_s: float) -> float:
        """Return the share of values above this one; there must be a value. O(bins)."""
        weights = self._seen()
        return float(weights[_bin(value_s) + 1 :].sum() / weights.sum())

    def _seen(self) -> NDArray[np.float64]:
        return np.frombuffer(self._weights)


def _bin(value_s: float) -> int:
    if value_s <= _LEAST_S:
        return 0
    return min(int(_BINS_PER_E * math.log(value_s / _LEAST_S)), _NUM_BINS - 1)
