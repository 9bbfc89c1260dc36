"""Refines a latency model by measured steps while it serves.

A model whose predictions are not linear in its coefficients is fitted by rescaling them.
"""

from __future__ import annotations

import math
from typing import Final, Generic, TypeVar

import numpy as np

from sglang_coserve.core.latency_model.model import Floats, LatencyModel, Sample, SampleTable

M = TypeVar("M", bound=LatencyModel)

# Weight of the start values, in samples: enough to keep a coefficient that no
# sample determines, too little to matter for one that a few samples determine.
_PRIOR_WEIGHT: Final = 1e-3


def rescaled(model: M, log_factors: Floats) -> M:
    """Return the model with each coefficient multiplied by exp(log_factor)."""
    factors = np.exp(log_factors).tolist()
    return model.with_coefficients(
        {
            name: value * factor
            for (name, value), factor in zip(model.coefficients.items(), factors, strict=True)
        }
    )


def fit_rescaled(start: M, table: SampleTable) -> M:
    """Return ``start`` rescaled to the least relative squared error on the table.

    The unknowns are the logarithms of the changes of the coefficients, which keeps them positive
    and independent of units. A coefficient of zero stays zero.
    """
    # Only fits need scipy, as in ``polynomial``.
    from scipy.optimize import least_squares

    size = len(start.coefficients)
    prior = math.sqrt(_PRIOR_WEIGHT) * np.eye(size)

    def shares(logs: Floats) -> Floats:
        return rescaled(start, logs).contributions(table) / table.seconds[:, np.newaxis]

    def errors(logs: Floats) -> Floats:
        return np.hstack([shares(logs).sum(axis=1) - 1.0, prior @ logs])

    def jacobian(logs: Floats) -> Floats:
        return np.vstack([shares(logs), prior])

    return rescaled(start, least_squares(errors, np.zeros(size), jac=jacobian, method="lm").x)


# Prior standard deviations of the change since the profile, as the logarithm of a coefficient:
# the whole machine (clocks, a noisy neighbour) is likelier to change than one kind of work.
_COMMON_CHANGE: Final = 1.0
_OWN_CHANGE: Final = 0.3
_NOISE: Final = 0.03
# Bound on the change of a coefficient; a machine that differs more must be profiled again.
_MAX_LOG_CHANGE: Final = math.log(32)

# Samples decay exponentially over so many.
_WINDOW_SAMPLES: Final = 100

# A residual counts in full up to this many times the running median of its size:
# Huber's 1.345 standard deviations for normal noise.
_HUBER: Final = 2.0
_MEDIAN_START: Final = 0.02
_MEDIAN_STEP: Final = 0.05
_MEDIAN_RANGE: Final = (0.005, 1.0)


class Refiner(Generic[M]):
    """Recursive least squares on measured steps, robust to outliers.

    The state is, for each coefficient, the logarithm x of its change since the
    profile; hence coefficients stay positive and predictions monotone. Each
    sample is linearised there: log(measured / predicted) = shares·Δx, where a
    share is a coefficient's part of the prediction. The estimate is ridge
    regression towards the profile over a fading window. The prior correlates
    the coefficients, so that a slower machine seen only through decodes slows
    the predicted prefills too, and work that is not observed is not forgotten.

    Huber weights bound the influence of one sample. Their scale is the running
    median of the absolute residuals: occasional outliers do not move it,
    while a lasting change of the machine does, and is then followed.

    A coefficient that is zero in the profile stays zero. Not
    thread-safe. Each ``refine`` is O(k³) for k ≤ 10 coefficients.
    """

    def __init__(self, model: M) -> None:
        """Start from a fitted model."""
        k = len(model.coefficients)
        self._profiled = model
        self.model = model
        """The model as refined so far."""

        self._keep = 1 - 1 / _WINDOW_SAMPLES
        prior_covariance = _COMMON_CHANGE**2 * np.ones((k, k)) + _OWN_CHANGE**2 * np.eye(k)
        self._prior = _NOISE**2 * np.linalg.inv(prior_covariance)
        self._information = np.zeros((k, k))
        self._moment = np.zeros(k)
        self._log_changes = np.zeros(k)
        self._median = _MEDIAN_START

    def refine(self, *samples: Sample) -> M:
        """Learn from measured steps, in their order, and return the refined model.

        Several samples at once cost hardly more than one.

        Raises:
            InputFileError: a batch is empty or a time is not positive.
        """
        table = SampleTable.of(samples)
        contributions = self.model.contributions(table)
        predicted_s = contributions.sum(axis=1)
        assert predicted_s.min() > 0, "refine needs a fitted model"
        shares = contributions / predicted_s[:, np.newaxis]
        residuals = np.log(table.seconds / predicted_s)
        ages = np.arange(len(samples) - 1, -1, -1)
        weights = self._keep**ages * [self._huber_weight(abs(r)) for r in residuals.tolist()]
        weighted = shares * weights[:, np.newaxis]

        kept = self._keep ** len(samples)
        targets = residuals + shares @ self._log_changes
        self._information = kept * self._information + weighted.T @ shares
        self._moment = kept * self._moment + targets @ weighted
        estimate = np.linalg.solve(self._prior + self._information, self._moment)
        self._log_changes = np.clip(estimate, -_MAX_LOG_CHANGE, _MAX_LOG_CHANGE)
        self.model = rescaled(self._profiled, self._log_changes)
        return self.model

    def _huber_weight(self, size: float) -> float:
        """Return the weight of a residual of this size, which then moves the median."""
        weight = min(1.0, _HUBER * self._median / max(size, 1e-12))
        step = _MEDIAN_STEP if size > self._median else -_MEDIAN_STEP
        low, high = _MEDIAN_RANGE
        self._median = min(max(self._median * math.exp(step), low), high)
        return weight
