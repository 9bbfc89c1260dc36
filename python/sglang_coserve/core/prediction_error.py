"""How well predictions have matched the iterations lately."""

from __future__ import annotations

from typing import Final

__all__ = ["PredictionError"]

_WEIGHT: Final = 1 / 200
_FEWEST: Final = 100
_LEAST_LIMIT: Final = 0.15
_LIMIT_OVER_PROFILE: Final = 3.0
_MOST: Final = 10.0

_SLOWNESS_WEIGHT: Final = 0.1
"""Held the share of harmed requests in 48 of 54 simulated settings; 46 with the last step alone, 42
without following the machine (``benchmark/bench_allowance.py``)."""


class PredictionError:
    """Moving averages of the relative error, and whether it has drifted.

    It has when the mean absolute error exceeds three times what the profile
    promised, and 15%: refinement then no longer follows the machine, or the machine
    is not the one that was profiled.
    """

    def __init__(self, profile_mape: float | None = None) -> None:
        """Start without measurements; ``profile_mape`` is a fraction, of the model's fit."""
        self._limit = max(_LEAST_LIMIT, _LIMIT_OVER_PROFILE * (profile_mape or 0.0))
        self._count = 0
        self._mape = 0.0
        self._bias = 0.0
        self._slowness = 1.0

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Take one iteration into account; both times are positive. O(1)."""
        # As for any mean until enough is known: one early outlier must not stay for long.
        self._count += 1
        weight = max(_WEIGHT, 1 / self._count)
        error = predicted_s / measured_s - 1.0
        # One stall of the machine predicts nothing; ten times over is as wrong as it gets.
        self._mape += weight * (min(abs(error), _MOST) - self._mape)
        self._bias += weight * (min(error, _MOST) - self._bias)
        slowness = min(measured_s / predicted_s, _MOST)
        self._slowness += _SLOWNESS_WEIGHT * (slowness - self._slowness)

    @property
    def mape(self) -> float | None:
        """Mean absolute error as a fraction of the measured time; None without measurements."""
        return self._mape if self._count else None

    @property
    def bias(self) -> float | None:
        """Mean of (predicted - measured) / measured; positive when predictions are cautious."""
        return self._bias if self._count else None

    @property
    def slowness(self) -> float:
        """How much longer than predicted the last steps took: measured ÷ predicted, about the
        mean of ten."""
        return self._slowness

    @property
    def limit(self) -> float:
        """The error from which predictions count as drifted."""
        return self._limit

    @property
    def has_drifted(self) -> bool:
        """True once enough iterations show an error beyond ``limit``."""
        return self._count >= _FEWEST and self._mape > self._limit
