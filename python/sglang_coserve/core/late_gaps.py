"""How many tokens of online decodes may still come late."""

from __future__ import annotations

from typing import Final

__all__ = ["LateGaps"]

_SHARE: Final = 0.008
"""Of the gaps between tokens: somewhat less than a target for the 99th percentile allows."""

_FEWEST: Final = 32.0
_ITERATIONS: Final = 2.0
"""Most that can be saved up, and owed: every decode late, so many times in a row."""

_WEIGHT: Final = 1 / 64


class LateGaps:
    """An account of late gaps: each gap earns a part of one, each late one costs one.

    What is owed because gaps were late for other reasons must be earned first.
    """

    def __init__(self) -> None:
        self._left = _FEWEST
        self._mean_decodes = 0.0

    @property
    def left(self) -> float:
        """How many gaps may be late now; negative after too many have been."""
        return self._left

    def observe(self, gaps: int, late: int) -> None:
        """Take a step into account that ended so many gaps, of which ``late`` were late. O(1)."""
        if not gaps:
            return
        self._mean_decodes += _WEIGHT * (gaps - self._mean_decodes)
        most = max(_FEWEST, _ITERATIONS * self._mean_decodes)
        left = self._left + _SHARE * gaps - late
        self._left = max(min(left, most), -most)
