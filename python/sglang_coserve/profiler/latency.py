"""Measures a grid of shapes within a time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from sglang_coserve.core.latency_model import Sample
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.profiler.executor import ShapeExecutor, StepShape
from sglang_coserve.profiler.grid import plan_grid
from sglang_coserve.profiler.measurement import MIN_RUNS, ShapeTiming, measure

__all__ = ["CostBound", "measure_grid", "quick_samples"]

# Largest share of the time limit for one shape, so that a few large ones do not use it up.
_SHAPE_SHARE: Final = 1 / 20
# After this many new shapes, an earlier one is measured again.
_REVISIT_AFTER: Final = 8

_LEAST_SHAPES: Final = 28
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
    done: Iterable[ShapeTiming] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[ShapeTiming]:
    """Yield measurements of the shapes in order, until all are measured or the time is up.

    Shapes in ``done`` are not measured again, and those that may take longer
    than their share of the limit are skipped: a later call with more time
    measures them. The first ``at_least`` shapes are measured however long they take. Every ninth
    measurement repeats a shape of this call, for
    ``repeat_error``. The caller may stop iterating at any time; the executor is left without
    state.

    Raises:
        ServerError: the engine failed on a shape.
    """
    end_s = clock() + time_limit_s
    shape_limit_s = time_limit_s * _SHAPE_SHARE
    bound = CostBound()
    known: set[StepShape] = set()
    for earlier in done:
        bound.observe(earlier.shape.stats, earlier.seconds)
        known.add(earlier.shape)
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
        if shape in known or (measurement := visit(shape)) is None:
            continue
        yield measurement
        measured.append(shape)
        if len(measured) % _REVISIT_AFTER == 0:
            # Repeat the oldest one that was not repeated yet.
            repeated = visit(measured[len(measured) // _REVISIT_AFTER - 1])
            if repeated is not None:
                yield repeated


def quick_samples(
    executor: ShapeExecutor, time_limit_s: float, *, clock: Callable[[], float] = time.monotonic
) -> list[Sample]:
    """Return samples of the default grid, as many as the time allows and enough to fit a model.

    With several ranks, ``clock`` must return the same time on all of them, because the
    choice of the next shape depends on it.
    """
    shapes = plan_grid(executor.limits)
    measurements = measure_grid(
        executor, shapes, time_limit_s=time_limit_s, at_least=_LEAST_SHAPES, clock=clock
    )
    return [measurement.sample for measurement in measurements]
