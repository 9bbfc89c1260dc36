"""Computes how much more offline work can be accepted and still finish in time. Pure arithmetic.

The rate of offline tokens is what online requests leave. The accepted batches need a part of it to
finish within their windows; the rest is the headroom.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sglang_coserve.batch.job_forecast import remaining_tokens
from sglang_coserve.batch.rate_forecast import HOUR_S, RateForecast
from sglang_coserve.batch.record import JobRecord

__all__ = ["Headroom", "HourlyRate", "headroom", "required_tokens_per_s"]

_LEAST_LEFT_S: Final = 60.0
"""Least time left that is assumed, so that a window that is about to close needs no infinite
rate."""


@dataclass(frozen=True, slots=True)
class HourlyRate:
    """Offline tokens a second in one of the next hours."""

    starts_at: int
    """Seconds since the epoch."""

    tokens_per_s: float
    is_measured: bool
    """Offline work was served at that hour of the day before; else it is taken to be like now."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """What offline work gets, what is promised of it, and what that leaves."""

    tokens_per_s: float | None
    """Offline tokens a second that the engine serves, or is expected to; None if unknown."""

    required_tokens_per_s: float
    """What the unfinished batches need to be complete within their windows."""

    headroom_tokens_per_s: float | None
    """What could be added; None if unknown."""

    by_hour: tuple[HourlyRate, ...]
    """The next 24 hours, this one first; empty if unknown."""


def required_tokens_per_s(
    batches: Iterable[JobRecord], now_s: float, token_bias: float = 1.0
) -> float:
    """Return the rate at which all ``batches`` would be complete just in time."""
    return sum(
        remaining_tokens(batch, token_bias) / max(batch.expires_at_s - now_s, _LEAST_LEFT_S)
        for batch in batches
    )


def headroom(
    rate: RateForecast | None, recent_per_s: float | None, required_per_s: float, now_s: float
) -> Headroom:
    """Return what could be added now.

    Args:
        rate: Of all offline work, from now on; None if unknown.
        recent_per_s: The rate of late; None if unknown.
        required_per_s: As ``required_tokens_per_s`` returns it.
        now_s: Seconds since the epoch.
    """
    here = int(now_s // HOUR_S)
    by_hour = () if rate is None else rate.by_hour
    return Headroom(
        tokens_per_s=recent_per_s,
        required_tokens_per_s=required_per_s,
        headroom_tokens_per_s=None
        if recent_per_s is None
        else max(recent_per_s - required_per_s, 0),
        by_hour=tuple(
            HourlyRate(int((here + ahead) * HOUR_S), tokens_per_s, is_measured)
            for ahead, (tokens_per_s, is_measured) in enumerate(by_hour)
        ),
    )
