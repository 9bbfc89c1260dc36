"""Controls a factor so that the harmed share meets the allowed one: a clipped integrator."""

from __future__ import annotations

import math
from typing import Final

__all__ = ["GAIN", "LEAST", "Integrator"]

GAIN: Final = 0.2
"""One harmed observation lowers the factor by 18%. Of 54 simulated settings with 4,000 requests
each (``benchmark/bench_allowance.py``), 48 kept their harmed share with it, 45 with half of it."""

_UNHARMED: Final = 10.0
"""The factor rises this many times faster until the first harm: with an allowed share of 1% it
doubles within 35 requests. It affects the start only: simulated as above, as many settings kept
their share without it."""

LEAST: Final = 1 / 64
"""Lower bound of the factor. It stays above zero, so that some offline work runs from
which to learn. Simulated as above, a bound of 1/500 kept the share no more often and left less
time to offline work: 42% instead of 46%."""

_LEAST_LOG: Final = math.log(LEAST)


class Integrator:
    """A factor that falls with each harmed observation and rises with each other one.

    Stochastic approximation (Robbins and Monro): its logarithm moves by
    gain · (allowed share - harmed share), so in the long run the harmed share equals the allowed
    one, whatever the cause of the harm. It rises faster until the first harm, as nothing is
    known yet.
    """

    def __init__(
        self, allowed: float, *, first: float, most: float = 1.0, gain: float = GAIN
    ) -> None:
        """Start at ``first``; the factor stays between 1/64 and ``most``."""
        self._allowed = allowed
        self._most = math.log(most)
        self._log = math.log(first)
        self._gain = gain
        self._gain_up = gain * _UNHARMED

    @property
    def factor(self) -> float:
        """The current factor."""
        return math.exp(self._log)

    def observe(self, harmed: float, weight: float = 1.0) -> None:
        """Record an observation of this weight; ``harmed`` is the harmed part of it. O(1)."""
        error = self._allowed - harmed
        if error < 0:
            self._gain_up = self._gain
        # A negative harm only undoes harm that was recorded before: it must not rise faster.
        gain = self._gain_up if 0 < error <= self._allowed else self._gain
        self._log = min(max(self._log + gain * weight * error, _LEAST_LOG), self._most)
