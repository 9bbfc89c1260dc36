"""How long to wait before something that failed is tried again."""

from __future__ import annotations

import random

__all__ = ["backoff_s"]


def backoff_s(failures: int, first_s: float, max_s: float, rng: random.Random) -> float:
    """Return the pause after the ``failures``-th failure in a row, 1 or more.

    Doubles from ``first_s`` to ``max_s``; up to half of it is taken off at random, so that
    what failed together is not tried again together.
    """
    # The exponent is capped because a float overflows long before anybody stops trying.
    return min(max_s, first_s * 2.0 ** min(failures - 1, 30)) * rng.uniform(0.5, 1.0)
