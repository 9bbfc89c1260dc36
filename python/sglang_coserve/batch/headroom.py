"""Computes how much more offline work can be accepted and still finish in time. Pure arithmetic.

The rate of offline tokens is what online requests leave. The accepted batches need a part of it to
finish within their windows; the rest is the headroom.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sglang_coserve.batch.job_forecast import remaining_tokens
from sglang_coserve.batch.record import JobRecord

__all__ = ["Headroom", "headroom", "required_tokens_per_s"]

_LEAST_LEFT_S: Final = 60.0
"""Least time left that is assumed, so that a window that is about to close needs no infinite
rate."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """What offline work gets, what is promised of it, and what that leaves."""

    tokens_per_s: float | None
    """Offline tokens a second that the engine serves, or is expected to; None if unknown."""

    required_tokens_per_s: float
    """What the unfinished batches need to be complete within their windows."""

    headroom_tokens_per_s: float | None
    """What could be added; None if unknown."""


def required_tokens_per_s(
    batches: Iterable[JobRecord], now_s: float, token_bias: float = 1.0
) -> float:
    """Return the rate at which all ``batches`` would be complete just in time."""
    return sum(
        remaining_tokens(batch, token_bias) / max(batch.expires_at_s - now_s, _LEAST_LEFT_S)
        for batch in batches
    )


def headroom(rate_per_s: float | None, required_per_s: float) -> Headroom:
    """Return what could be added now.

    Args:
        rate_per_s: Of offline tokens, of late; None if unknown.
        required_per_s: As ``required_tokens_per_s`` returns it.
    """
    spare_per_s = None if rate_per_s is None else max(rate_per_s - required_per_s, 0)
    return Headroom(rate_per_s, required_per_s, spare_per_s)
