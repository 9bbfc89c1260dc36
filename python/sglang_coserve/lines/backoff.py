"""Exponential back-off with jitter."""

from __future__ import annotations

import random

__all__ = ["backoff_s"]


def backoff_s(failures: int, first_s: float, max_s: float, rng: random.Random) -> float:
    """Return the pause in seconds after the ``failures``-th consecutive failure, from 1.

    It doubles from ``first_s`` up to ``max_s``, and is reduced by up to half at random, so that
    requests that failed together are not retried together.
    """
    # The exponent is capped, because the float would overflow.
    return min(max_s, first_s * 2.0 ** min(failures - 1, 30)) * rng.uniform(0.5, 1.0)
