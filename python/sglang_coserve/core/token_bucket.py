"""A long-run rate with room for bursts."""

from __future__ import annotations

__all__ = ["TokenBucket"]


class TokenBucket:
    """Fills at ``rate`` a second up to ``capacity``, and starts full.

    More may be taken than there is: the bucket is then in debt, so that one item
    larger than the whole bucket is still possible. All operations are O(1).
    """

    def __init__(self, *, rate: float, capacity: float) -> None:
        """``rate`` and ``capacity`` are positive."""
        assert rate > 0, f"rate is {rate}"
        assert capacity > 0, f"capacity is {capacity}"
        self._rate = rate
        self._capacity = capacity
        self._level = capacity
        self._at_s: float | None = None

    def level(self, now_s: float) -> float:
        """Return what is in it; negative when it is in debt. Changes nothing."""
        if self._at_s is None or now_s <= self._at_s:
            return self._level
        return min(self._level + self._rate * (now_s - self._at_s), self._capacity)

    def take(self, amount: float, now_s: float) -> None:
        """Take ``amount`` out, whatever is in it."""
        assert amount >= 0, f"amount is {amount}"
        self._level = self.level(now_s) - amount
        self._at_s = now_s if self._at_s is None else max(now_s, self._at_s)
