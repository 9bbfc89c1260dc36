"""A latency model that is corrected by measured steps, and how well it has matched them lately."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from sglang_coserve.core.latency_model.model import LatencyModel, Sample
from sglang_coserve.core.latency_model.refiner import Refiner
from sglang_coserve.core.learned_times import MovingMean
from sglang_coserve.core.step_stats import StepStats

_REFINED_AT_ONCE: Final = 16
"""Samples per refinement. Refining costs more than planning, but hardly more for many samples than
for one."""


def pipelined(
    predict: Callable[[StepStats], float], batch: StepStats, overlapping: Sequence[StepStats]
) -> tuple[float, bool]:
    """Return the seconds of a step in a pipeline, and whether no overlapping batch is slower.

    A pipeline of K stages has K micro-batches in flight, each one stage behind the one before it.
    All advance at the pace of the slowest, so a step takes as long as the slowest of the last K
    would take alone (HyGen keeps the last K steps for the same reason, appendix A).

    Between its start and its tokens K steps begin, including itself. At each start all
    batches advance by one stage, which takes 1/K of the time of the slowest. O(K**2).

    ``overlapping`` are the K - 1 batches before it and the K - 1 after it, in order. ``predict``
    returns the seconds of a batch that passes through all stages alone.
    """
    alone_s = predict(batch)
    if not overlapping:
        return alone_s, True
    others_s = [0.0 if other.is_empty else predict(other) for other in overlapping]
    before = len(others_s) // 2
    depth = before + 1
    all_s = [*others_s[:before], alone_s, *others_s[before:]]
    total_s = sum(max(all_s[first : first + depth]) for first in range(depth))
    return total_s / depth, alone_s >= max(others_s)


_WEIGHT: Final = 1 / 200
_FEWEST: Final = 100
"""Steps to observe before a drift is reported."""

_LEAST_LIMIT: Final = 0.15
_LIMIT_OVER_PROFILE: Final = 3.0
_MOST: Final = 10.0

_SLOWNESS_WEIGHT: Final = 0.1
"""Weight of a step in the moving average. Of 54 simulated settings 48 kept their share of late
requests with it, 46 with the last step alone, 42 without the correction."""

_WARNING_INTERVAL_S: Final = 60.0

_LATE_STEPS: Final = 0.05
"""Share of the steps that may take longer than the reserve accounts for."""

MOST_RESERVE: Final = 0.25
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

        self._mape, self._bias = MovingMean(_WEIGHT), MovingMean(_WEIGHT)
        self._warn_from_s = 0.0
        self.slowness = 1.0
        """Measured ÷ predicted time, averaged over about the last ten steps."""

        self.reserve = min(_P95_OVER_MEAN * (profile_mape or 0.0), MOST_RESERVE)
        """How much longer than predicted steps take, but for the slowest 5%; as a fraction."""

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Record the times of one step, both positive. O(1)."""
        error = predicted_s / measured_s - 1.0
        # Errors are capped, as a single stall of the machine says nothing about the next steps.
        self._mape.add(min(abs(error), _MOST))
        self._bias.add(min(error, _MOST))
        slowness = min(measured_s / predicted_s, _MOST)
        self.slowness += _SLOWNESS_WEIGHT * (slowness - self.slowness)

        is_late = measured_s > predicted_s * (1 + self.reserve)
        self.reserve += _RESERVE_GAIN * (1 - _LATE_STEPS if is_late else -_LATE_STEPS)
        self.reserve = min(max(self.reserve, 0.0), MOST_RESERVE)

    @property
    def mape(self) -> float | None:
        """Mean absolute error as a fraction of the measured time; None without measurements."""
        return self._mape.value if self._mape.count else None

    @property
    def bias(self) -> float | None:
        """Mean of (predicted - measured) / measured; positive if steps are overestimated."""
        return self._bias.value if self._bias.count else None

    @property
    def has_drifted(self) -> bool:
        """True once at least 100 steps were observed and the mean error exceeds ``limit``."""
        return self._mape.count >= _FEWEST and self._mape.value > self.limit

    def warning(self, now_s: float) -> str | None:
        """Return what operators are to know while predictions are off, at most once a minute."""
        if not self.has_drifted or now_s < self._warn_from_s:
            return None
        self._warn_from_s = now_s + _WARNING_INTERVAL_S
        return (
            f"predicted step times are off by {self._mape.value:.0%} on average (bias "
            f"{self._bias.value:+.0%}): targets may be missed or time wasted; other work on this "
            "machine? profile again with coserve profile"
        )


class LearnedModel:
    """Refines a latency model by measured steps, and tracks how slow the machine is lately."""

    def __init__(
        self, model: LatencyModel, *, refines: bool, profile_mape: float | None = None
    ) -> None:
        """Start with ``model``, which never changes unless ``refines``.

        ``profile_mape`` is its mean absolute percentage error when it was fitted, as a fraction.
        """
        self.model = model
        """The latency model, as refined so far."""

        self._refiner = Refiner(model) if refines else None
        self._observed: list[Sample] = []
        self.error = PredictionError(profile_mape)
        """The error of the predictions, each made before the model was corrected by that step."""

    def observe(self, sample: Sample, overlapping: Sequence[StepStats] = ()) -> None:
        """Learn from a measured step. Amortized O(1).

        ``overlapping`` are the batches that shared a pipeline with it (see ``StepResult``). If
        one of them is slower, the time says little about this batch and does not refine the model.

        Raises:
            InputFileError: the measured time is not positive.
        """
        predicted_s, is_slowest = pipelined(self.model.predict, sample.batch, overlapping)
        self.error.observe(predicted_s, sample.seconds)
        if self._refiner is None or not is_slowest:
            return
        self._observed.append(sample)
        if len(self._observed) == _REFINED_AT_ONCE:
            self.model = self._refiner.refine(*self._observed)
            self._observed.clear()

    def predict_now(self, batch: StepStats) -> float:
        """Return the seconds of a step, scaled by how slow the machine is at present."""
        return self.model.predict(batch) * self.error.slowness
