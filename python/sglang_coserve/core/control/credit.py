"""Credit for late values: what an SLO's percentile tolerates, less what was late."""

from __future__ import annotations

__all__ = ["Credit"]


class Credit:
    """An account of late values.

    It gains the tolerated share of each value, and loses each late one. It holds at most what a
    whole window of values tolerates, in either direction, so that an old surplus, or an old debt,
    is forgotten within a window.
    """

    def __init__(self, tolerated: float) -> None:
        """Start with neither credit nor debt; ``tolerated`` is the share of late values."""
        self._tolerated = tolerated
        self._credit = 0.0
        self._most = 1.0

    @property
    def level(self) -> float:
        """The credit as a share of the most that it can be: -1 (debt) to 1."""
        return self._credit / self._most

    def observe(self, late: float, count: float, window: float) -> None:
        """Record ``count`` values, of which ``late`` were late, in a window of ``window``."""
        self._most = max(self._tolerated * window, 1.0)
        credit = self._credit + self._tolerated * count - late
        self._credit = min(max(credit, -self._most), self._most)
