"""How much of the time an engine has work."""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["BusyShare"]

_SPAN_S: Final = 30.0
"""Of the mean: what who starts or stops servers looks at, and many steps."""


class BusyShare:
    """The share of the last half minute in which a batch ran, from the scheduler's passes."""

    def __init__(self, now_s: float) -> None:
        self._pass_s = now_s
        self._is_busy = False
        self._busy_s = 0.0
        self._marks = deque([(now_s, 0.0)])

    def passes(self, now_s: float, *, is_busy: bool) -> None:
        """Note that a pass has decided what runs until the next one. O(1)."""
        if self._is_busy:
            self._busy_s += now_s - self._pass_s
        self._pass_s, self._is_busy = now_s, is_busy

    def share(self, now_s: float) -> float:
        """Return it, 0 to 1; to be asked about once a second. O(1) amortized."""
        self.passes(now_s, is_busy=self._is_busy)
        self._marks.append((now_s, self._busy_s))
        while len(self._marks) > 2 and self._marks[1][0] <= now_s - _SPAN_S:
            self._marks.popleft()
        since_s, busy_s = self._marks[0]
        return (self._busy_s - busy_s) / (now_s - since_s) if now_s > since_s else 0.0
