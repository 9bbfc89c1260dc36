"""The rate that offline work will have, from what it had at that hour of the day.

Online requests take what they need, so the rate of offline tokens is what they leave: its
mean by the hour of the day is the prediction of both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

__all__ = ["HOUR_S", "REMEMBERED_HOURS", "RateForecast", "Served"]

HOUR_S: Final = 3600.0
_HOURS: Final = 24
REMEMBERED_HOURS: Final = 7 * _HOURS
"""What was served more than a week ago is forgotten: other machines, models and customs."""

_RECENT_S: Final = 60.0
"""The time with work that the measured rate spans; an hour's mean is weighed against it."""


@dataclass(frozen=True, slots=True)
class Served:
    """Tokens of offline work, and the seconds in which there was any."""

    tokens: float = 0.0
    busy_s: float = 0.0

    def __add__(self, other: Served) -> Served:
        return Served(self.tokens + other.tokens, self.busy_s + other.busy_s)


@dataclass(frozen=True, slots=True)
class RateForecast:
    """Tokens a second, hour by hour."""

    recent_per_s: float
    """The rate of the last minute with work; more than 0."""

    hours: Mapping[int, Served] = field(default_factory=dict)
    """What was served, by the hour since the epoch."""

    def delay_s(self, tokens: float, now_s: float) -> float:
        """Return the seconds in which ``tokens`` are served from now on. O(hours known).

        An hour of the day without history is taken to be like this one.
        """
        by_hour = self._by_hour_of_day(now_s)
        here = int(now_s // HOUR_S)
        here_per_s = self._mean(by_hour.get(here % _HOURS, Served()), self.recent_per_s)
        rates = [here_per_s]
        for ahead in range(1, _HOURS):
            served = by_hour.get((here + ahead) % _HOURS, Served())
            rates.append(self._mean(served, here_per_s))
        until_s = (here + 1) * HOUR_S - now_s
        delay_s = 0.0
        a_day = HOUR_S * sum(rates)
        days = max(0, math.floor(tokens / a_day) - 1)
        tokens -= days * a_day
        ahead = 0
        while tokens > rates[ahead % _HOURS] * until_s:
            tokens -= rates[ahead % _HOURS] * until_s
            delay_s += until_s
            until_s = HOUR_S
            ahead += 1
        return days * _HOURS * HOUR_S + delay_s + tokens / rates[ahead % _HOURS]

    def _by_hour_of_day(self, now_s: float) -> dict[int, Served]:
        oldest = int(now_s // HOUR_S) - REMEMBERED_HOURS
        found: dict[int, Served] = {}
        for hour, served in self.hours.items():
            if hour > oldest:
                found[hour % _HOURS] = found.get(hour % _HOURS, Served()) + served
        return found

    @staticmethod
    def _mean(served: Served, otherwise_per_s: float) -> float:
        return (served.tokens + _RECENT_S * otherwise_per_s) / (served.busy_s + _RECENT_S)
