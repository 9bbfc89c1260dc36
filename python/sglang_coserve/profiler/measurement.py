"""Measures the time of one shape."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from sglang_coserve.core.latency_model import Sample
from sglang_coserve.profiler.executor import ShapeExecutor, StepShape

__all__ = ["MIN_RUNS", "ShapeTiming", "measure", "repeat_error"]

MIN_RUNS: Final = 3
"""Least number of timed runs of a shape, if its time budget allows them."""

_MAX_RUNS: Final = 10
# Runs end when the relative standard error of the mean is below this.
_PRECISION: Final = 0.005
# An outlier is this many robust standard deviations from the median, and at
# least this share of it: equal timings must not make outliers of all others.
_OUTLIER_DEVIATIONS: Final = 3.5
_OUTLIER_SHARE: Final = 0.02
# The standard deviation of a normal distribution, over its median absolute deviation.
_MAD_SCALE: Final = 1.4826


@dataclass(frozen=True, slots=True)
class ShapeTiming:
    """The timed runs of one shape."""

    shape: StepShape
    runs_s: tuple[float, ...]
    """All timed runs in order, without the warm-up."""

    @property
    def kept_s(self) -> tuple[float, ...]:
        """The runs without outliers, by their distance from the median in units of the MAD."""
        return _without_outliers(self.runs_s)

    @property
    def seconds(self) -> float:
        """The mean of the kept runs."""
        return statistics.fmean(self.kept_s)

    @property
    def sample(self) -> Sample:
        """The sample for fitting a latency model."""
        return Sample(self.shape.stats, self.seconds)


def measure(
    executor: ShapeExecutor, shape: StepShape, *, budget_s: float, clock: Callable[[], float]
) -> ShapeTiming:
    """Run the shape once to warm up, then until the mean is precise or the time is up.

    At least one run is timed; no further one starts later than ``budget_s`` from now.

    Raises:
        ServerError: the engine failed on this shape.
    """
    end_s = clock() + budget_s
    executor.run(shape)
    runs_s = [executor.run(shape)]
    while len(runs_s) < _MAX_RUNS and not _is_precise(runs_s) and clock() < end_s:
        runs_s.append(executor.run(shape))
    return ShapeTiming(shape, tuple(runs_s))


def repeat_error(measurements: Iterable[ShapeTiming]) -> float | None:
    """Return the part of a prediction's MAPE that is due to noise of the machine.

    Computed from shapes that were measured again later, so it includes slow drift
    as well as jitter: the mean of |a − b| / (a + b) · √2 over pairs (a, b) of
    successive measurements. For independent normal errors that is the mean
    absolute relative error of one measurement, hence the least MAPE that any
    model can reach. None without a repeated shape.
    """
    by_shape: defaultdict[StepShape, list[float]] = defaultdict(list)
    for measurement in measurements:
        by_shape[measurement.shape].append(measurement.seconds)
    errors = [
        math.sqrt(2) * abs(first - second) / (first + second)
        for times in by_shape.values()
        for first, second in pairwise(times)
    ]
    return statistics.fmean(errors) if errors else None


def _is_precise(runs_s: Sequence[float]) -> bool:
    if len(runs_s) < MIN_RUNS:
        return False
    kept = _without_outliers(runs_s)
    if len(kept) < MIN_RUNS:
        return False
    error = statistics.stdev(kept) / math.sqrt(len(kept))
    return error <= _PRECISION * statistics.fmean(kept)


def _without_outliers(runs_s: Sequence[float]) -> tuple[float, ...]:
    median = statistics.median(runs_s)
    deviation = _MAD_SCALE * statistics.median(abs(run - median) for run in runs_s)
    limit = max(_OUTLIER_DEVIATIONS * deviation, _OUTLIER_SHARE * median)
    return tuple(run for run in runs_s if abs(run - median) <= limit)
