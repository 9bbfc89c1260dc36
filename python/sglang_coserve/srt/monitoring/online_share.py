"""Which part of its time an engine works for online requests."""

from __future__ import annotations

from collections import deque
from typing import Final

_WINDOW_S: Final = 10.0
"""Gateways and autoscalers ask every few seconds."""


class OnlineShare:
    """The part of the last seconds in which the engine worked for online requests."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def at(self, now_s: float, online_s: float) -> float:
        """Return the part, 0 to 1, at a time that never goes back; O(1) amortized.

        ``online_s`` is what all steps so far took for online requests.
        """
        seen = self._seen
        seen.append((now_s, online_s))
        # The last one that is old enough is what to compare with.
        while len(seen) > 1 and seen[1][0] <= now_s - _WINDOW_S:
            seen.popleft()
        then_s, worked_s = seen[0]
        if now_s <= then_s:
            return 0.0
        return min(1.0, max(0.0, (online_s - worked_s) / (now_s - then_s)))
