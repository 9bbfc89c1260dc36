"""Measures a grid of shapes, each several times, within a time limit."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from sglang_coserve.core.latency_model.model import Sample
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.profiler.shapes import ShapeExecutor, StepShape

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


# Largest share of the time limit for one shape, so that a few large ones do not use it up.
_SHAPE_SHARE: Final = 1 / 20
# After this many new shapes, an earlier one is measured again.
_REVISIT_AFTER: Final = 8

LEAST_SHAPES: Final = 28
"""Shapes of a quick profile that are measured even when its time is up: four of each ladder of the
grid, all small. Without them a loaded machine has too few samples to fit any model: a server with
a model of experts, which has no datasheet model, did not start then."""


class CostBound:
    """An upper bound on the time of a batch that needs no fit.

    Assume that the time is a sum of features (those of the polynomial model: tokens, attention,
    context, requests and a constant) with unknown non-negative coefficients.
    Then the ratio of the times of two batches is at most the largest ratio of their
    features. A batch with a kind of requests that the other lacks is not bounded
    by it.
    """

    def __init__(self) -> None:
        self._measured: list[tuple[tuple[float, ...], float]] = []

    def observe(self, batch: StepStats, seconds: float) -> None:
        """Add a measured batch."""
        self._measured.append((_works(batch), seconds))

    def seconds(self, batch: StepStats) -> float:
        """Return the least bound; 0 if no observed batch bounds this one. O(observations)."""
        works = _works(batch)
        bound_s = min(
            (seconds * max(map(_ratio, works, measured)) for measured, seconds in self._measured),
            default=math.inf,
        )
        return bound_s if bound_s < math.inf else 0.0


def _works(batch: StepStats) -> tuple[float, ...]:
    return (
        1.0,
        batch.compute_tokens,
        batch.attention_pairs,
        batch.total_tokens,
        batch.prefill_requests,
        batch.decode_requests,
    )


def _ratio(work: float, measured: float) -> float:
    if measured:
        return work / measured
    return math.inf if work else 0.0


def measure_grid(
    executor: ShapeExecutor,
    shapes: Sequence[StepShape],
    *,
    time_limit_s: float,
    at_least: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[ShapeTiming]:
    """Yield measurements of the shapes in order, until all are measured or the time is up.

    Shapes that may take longer than their share of the limit are skipped. The first ``at_least``
    shapes are measured however long they take. Every ninth measurement repeats an earlier shape,
    for ``repeat_error``. The caller may stop at any time; the executor is left without state.

    Raises:
        ServerError: the engine failed on a shape.
    """
    end_s = clock() + time_limit_s
    shape_limit_s = time_limit_s * _SHAPE_SHARE
    bound = CostBound()
    measured: list[StepShape] = []

    def visit(shape: StepShape) -> ShapeTiming | None:
        budget_s = min(shape_limit_s, end_s - clock())
        warm_up_and_runs = 1 + MIN_RUNS
        is_long = budget_s <= 0 or bound.seconds(shape.stats) * warm_up_and_runs > budget_s
        if is_long and len(measured) >= at_least:
            return None
        measurement = measure(executor, shape, budget_s=budget_s, clock=clock)
        bound.observe(shape.stats, measurement.seconds)
        return measurement

    for shape in shapes:
        if clock() >= end_s and len(measured) >= at_least:
            return
        if (measurement := visit(shape)) is None:
            continue
        yield measurement
        measured.append(shape)
        if len(measured) % _REVISIT_AFTER == 0:
            # Repeat the oldest one that was not repeated yet.
            repeated = visit(measured[len(measured) // _REVISIT_AFTER - 1])
            if repeated is not None:
                yield repeated
