"""How often online requests arrive, and what iterations that leaves time for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final

__all__ = ["ArrivalRate", "best_iteration_s"]

_WINDOW: Final = 64


class ArrivalRate:
    """The rate of the last online arrivals; it falls while none come."""

    def __init__(self) -> None:
        self._arrivals_s: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, arrivals_s: Iterable[float]) -> None:
        """Take requests into account once they have their first token."""
        self._arrivals_s.extend(arrivals_s)

    def per_s(self, now_s: float) -> float:
        """Return the arrivals a second; 0 before the second. O(1)."""
        count = len(self._arrivals_s)
        span_s = now_s - self._arrivals_s[0] if count else 0.0
        return count / span_s if count > 1 and span_s > 0 else 0.0


def best_iteration_s(overhead_s: float, arrivals_per_s: float) -> float:
    """Return the length of iterations that gets most offline work done if arrivals abort them.

    Of an iteration of length w, ``overhead_s`` does no offline work, and an arrival
    throws half of it away on average: what is lost, overhead / w + rate · w / 2 of
    the time, is least at sqrt(2 · overhead / rate). That is Young's interval between
    checkpoints (CACM 17:9, 1974), with arrivals for failures. Infinite without arrivals.
    """
    return math.sqrt(2 * overhead_s / arrivals_per_s) if arrivals_per_s > 0 else math.inf
