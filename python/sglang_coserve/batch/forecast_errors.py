"""Corrects forecasts by the errors of earlier ones."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["REMEMBERED", "FinishEstimate", "ForecastErrors", "PastJob"]

_ALIKE: Final = 39
"""The fewest of which P95 is a value with one beyond it, and P5 one with one below."""

_FEWEST: Final = 19
"""The fewest of which P95 is a value at all."""

REMEMBERED: Final = 10 * _ALIKE
"""Past batches that are looked at: enough of each size, when sizes differ tenfold."""

_PRIOR: Final = tuple(math.exp(0.25 * step) for step in range(-9, 10))
"""Actual ÷ predicted where fewer batches have ended: from a tenth to ten times. Of 509 simulated
batches the 5% quantiles were 0.6 and 0.7, the 95% quantiles 5.3 and 5.9, the extremes 0.3 and 22
(tag ``measurements-1``)."""


@dataclass(frozen=True, slots=True)
class PastJob:
    """A batch that is complete."""

    forecast_s: float
    """Its duration as forecast at admission, before any correction."""

    actual_s: float


@dataclass(frozen=True, slots=True)
class FinishEstimate:
    """When a batch will be complete, in seconds from now: 5, 50 and 95 of 100 are by then."""

    p05_s: float
    p50_s: float
    p95_s: float


class ForecastErrors:
    """Empirical quantiles of actual ÷ forecast, of past batches that were to take about as long.

    Of n past errors the k-th smallest exceeds the next one with the probability k ÷ (n + 1), if
    all of them are alike: no more is assumed of how they are distributed. So with few of
    them P95 is the largest, and with fewer than that, errors that nobody has seen are put
    beside them.
    """

    def __init__(self, past: Iterable[PastJob] = ()) -> None:
        """Start with ``past`` batches, the oldest first."""
        self._newest: deque[tuple[float, float]] = deque()
        self._by_size: list[tuple[float, float]] = []
        for each in past:
            self.add(each)

    def __len__(self) -> int:
        return len(self._newest)

    def add(self, past: PastJob) -> None:
        """Take in a batch that has ended. O(batches)."""
        if min(past.forecast_s, past.actual_s) <= 0:
            return
        entry = (math.log(past.forecast_s), past.actual_s / past.forecast_s)
        self._newest.append(entry)
        insort(self._by_size, entry)
        if len(self._newest) > REMEMBERED:
            self._by_size.remove(self._newest.popleft())

    def finish(self, forecast_s: float) -> FinishEstimate:
        """Return when a batch is complete that would take ``forecast_s`` by the forecast. O(1)."""
        ratios = sorted(self._alike(forecast_s))
        return FinishEstimate(
            forecast_s * _quantile(ratios, 0.05),
            forecast_s * _quantile(ratios, 0.5),
            forecast_s * _quantile(ratios, 0.95),
        )

    def _alike(self, forecast_s: float) -> list[float]:
        """Return the errors of the batches that are nearest in size."""
        found = self._by_size
        if len(found) > _ALIKE:
            size = math.log(forecast_s) if forecast_s > 0 else -math.inf
            low = high = bisect_left(found, (size,))
            while high - low < _ALIKE:
                if high == len(found) or (
                    low > 0 and size - found[low - 1][0] <= found[high][0] - size
                ):
                    low -= 1
                else:
                    high += 1
            found = found[low:high]
        ratios = [ratio for _, ratio in found]
        return ratios if len(ratios) >= _FEWEST else [*ratios, *_PRIOR]


def _quantile(ratios: list[float], share: float) -> float:
    """Return the value that the next one is below with the probability ``share``."""
    place = share * (len(ratios) + 1)
    # Rounded away from the middle: an error is rather feared than hoped for.
    index = math.floor(place) if share < 0.5 else math.ceil(place - 1e-9)
    if share == 0.5:
        middle = len(ratios) // 2
        return ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] * ratios[middle]) ** 0.5
    return ratios[min(max(index, 1), len(ratios)) - 1]
