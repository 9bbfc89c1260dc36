"""The rate that offline work will have, from what it had at that hour of the day.

Online requests take what they need, so the rate of offline tokens is what they leave: its
mean by the hour of the day is the prediction of both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["HOUR_S", "REMEMBERED_HOURS", "RateForecast", "ServedTokens"]

HOUR_S: Final = 3600.0
_HOURS: Final = 24
REMEMBERED_HOURS: Final = 7 * _HOURS
"""What was served more than a week ago is forgotten: other machines, models and customs."""

_RECENT_S: Final = 60.0
"""The time with work that the measured rate spans; an hour's mean is weighed against it."""


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """Tokens of offline work, and the seconds in which there was any."""

    tokens: float = 0.0
    busy_s: float = 0.0

    def __add__(self, other: ServedTokens) -> ServedTokens:
        return ServedTokens(self.tokens + other.tokens, self.busy_s + other.busy_s)


class RateForecast:
    """Tokens a second, hour by hour, as forecast at one moment."""

    def __init__(
        self, recent_per_s: float, now_s: float, hours: Mapping[int, ServedTokens] | None = None
    ) -> None:
        """Forecast from now on. O(hours known).

        An hour of the day without history is taken to be like this one.

        Args:
            recent_per_s: The rate of the last minute with work; more than 0.
            now_s: Seconds since the epoch.
            hours: What was served, by the hour since the epoch.
        """
        here = int(now_s // HOUR_S)
        by_hour = _by_hour_of_day(hours or {}, here - REMEMBERED_HOURS)
        here_per_s = _mean(by_hour.get(here % _HOURS, ServedTokens()), recent_per_s)
        self._per_s = [here_per_s]
        self._known = frozenset((hour - here) % _HOURS for hour in by_hour)
        for ahead in range(1, _HOURS):
            served = by_hour.get((here + ahead) % _HOURS, ServedTokens())
            self._per_s.append(_mean(served, here_per_s))
        self._a_day = HOUR_S * sum(self._per_s)
        self._here_s = (here + 1) * HOUR_S - now_s

    @property
    def by_hour(self) -> list[tuple[float, bool]]:
        """Tokens a second of this hour and the next 23, and whether there is history of each."""
        return [(per_s, ahead in self._known) for ahead, per_s in enumerate(self._per_s)]

    def delay_s(self, tokens: float) -> float:
        """Return the seconds in which ``tokens`` are served. O(1)."""
        days = max(0, math.floor(tokens / self._a_day) - 1)
        tokens -= days * self._a_day
        delay_s, left_s, ahead = days * _HOURS * HOUR_S, self._here_s, 0
        while tokens > (served := self._per_s[ahead % _HOURS] * left_s):
            tokens -= served
            delay_s += left_s
            left_s = HOUR_S
            ahead += 1
        return delay_s + tokens / self._per_s[ahead % _HOURS]


def _by_hour_of_day(hours: Mapping[int, ServedTokens], oldest: int) -> dict[int, ServedTokens]:
    found: dict[int, ServedTokens] = {}
    for hour, served in hours.items():
        if hour > oldest:
            found[hour % _HOURS] = found.get(hour % _HOURS, ServedTokens()) + served
    return found


def _mean(served: ServedTokens, otherwise_per_s: float) -> float:
    return (served.tokens + _RECENT_S * otherwise_per_s) / (served.busy_s + _RECENT_S)
