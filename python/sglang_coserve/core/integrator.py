"""A factor that holds a measured share at what is allowed: a clipped integrator."""

from __future__ import annotations

import math
from typing import Final

__all__ = ["GAIN", "Integrator"]

GAIN: Final = 0.2
"""One harmed observation takes 18%. Of 54 simulated settings (``benchmark/bench_allowance.py``, of
4,000 requests each) 48 held their share with it, 45 with half of it."""

_UNHARMED: Final = 10.0
"""Until something is harmed it rises so many times faster: a factor for a hundredth then doubles
with 35 requests. It changes the start only: simulated as above, as many settings held without."""

_LEAST: Final = math.log(1 / 64)
"""Above zero, so that there is something to learn from. Simulated as above, 1/500 held the share
no more often and left less to offline work: 42% of the time instead of 46%."""


class Integrator:
    """A factor that falls with every harmed observation and rises with every other one.

    After Robbins and Monro: its logarithm moves by gain · (allowed share - harmed), so in
    the long run as much is harmed as is allowed, whatever makes it so. Until something is
    harmed for the first time it rises faster, as nothing is known yet.
    """

    def __init__(
        self, allowed: float, *, first: float, most: float = 1.0, gain: float = GAIN
    ) -> None:
        """Start at ``first``; ``most`` is the largest factor, 1/64 the least."""
        self._allowed = allowed
        self._most = math.log(most)
        self._log = math.log(first)
        self._gain = gain
        self._gain_up = gain * _UNHARMED

    @property
    def factor(self) -> float:
        """The factor."""
        return math.exp(self._log)

    def observe(self, harmed: float, weight: float = 1.0) -> None:
        """Take an observation into account, or ``weight`` of which this part was harmed. O(1)."""
        error = self._allowed - harmed
        if error < 0:
            self._gain_up = self._gain
        # More than what is allowed is given back only for harm that was taken before.
        gain = self._gain_up if 0 < error <= self._allowed else self._gain
        self._log = min(max(self._log + gain * weight * error, _LEAST), self._most)
