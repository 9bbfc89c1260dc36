"""What is left out of every model: learned from first tokens that came late."""

from __future__ import annotations

import math
from typing import Final

__all__ = ["LATE_SHARE", "LateFirstTokens"]

LATE_SHARE: Final = 0.01
"""Of the requests, as a target for the 99th percentile allows."""

_STEP_DOWN: Final = 0.03
_STEP_UP: Final = _STEP_DOWN * LATE_SHARE / (1 - LATE_SHARE)
"""One late request in a hundred leaves the factor where it is. Ten times larger steps stopped
offline work for good on a machine with slow spells, and first tokens were no earlier for it."""

_LEAST: Final = math.log(1 / 8)


class LateFirstTokens:
    """A factor for the time that offline work may take: less after each first token it made late.

    It rises slowly while they are in time, so that in the long run one in a hundred is
    late because of it (a stochastic approximation of the quantile, after Robbins and
    Monro). Neither queues nor a machine that slows down for a second need to be modelled
    for that. A first token that would have been late without offline work says nothing:
    to count it stops offline work for good where online requests alone miss the target
    once in a hundred, and helps none of them.
    """

    def __init__(self) -> None:
        self._log_factor = 0.0

    @property
    def factor(self) -> float:
        """From 1/8 to 1."""
        return math.exp(self._log_factor)

    def observe(self, ttft_s: float, added_s: float, limit_s: float) -> None:
        """Take a first token into account. O(1).

        Args:
            ttft_s: How long after the arrival it came.
            added_s: What offline work has added to that.
            limit_s: The TTFT from which on a request is late.
        """
        if ttft_s <= limit_s:
            step = _STEP_UP
        elif ttft_s - added_s <= limit_s:
            step = -_STEP_DOWN
        else:
            return
        self._log_factor = min(max(self._log_factor + step, _LEAST), 0.0)
