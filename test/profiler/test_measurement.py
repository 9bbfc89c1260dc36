from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.modelled_executor import LIMITS
from sglang_coserve.cli.profile import ProfileProgress
from sglang_coserve.core.latency_model.polynomial import EAGER, PolynomialModel
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.profiler.latency import CostBound, ShapeTiming, measure, repeat_error
from sglang_coserve.profiler.shapes import ExecutorLimits, StepShape

SHAPE = StepShape(prefills=((64, 0),))


@dataclass
class ReplayExecutor:
    """Takes the given times, one after the other."""

    times_s: Iterator[float]
    limits: ExecutorLimits = LIMITS
    now_s: float = 0.0

    def run(self, shape: StepShape) -> float:
        seconds = next(self.times_s)
        self.now_s += seconds
        return seconds

    def clock(self) -> float:
        return self.now_s


def replay(*times_s: float, budget_s: float = 100.0) -> ShapeTiming:
    executor = ReplayExecutor(iter(times_s))
    return measure(executor, SHAPE, budget_s=budget_s, clock=executor.clock)


def test_runs_go_on_until_the_mean_is_precise_without_outliers() -> None:
    assert replay(9.0, 1.0, 1.0, 1.0).runs_s == (1.0, 1.0, 1.0)  # The warm-up does not count.
    measurement = replay(1.0, 1.0, 7.0, 1.01, 0.99, 1.0, *[1.0] * 9)
    assert 3 < len(measurement.runs_s) <= 10
    assert 7.0 in measurement.runs_s
    assert 7.0 not in measurement.kept_s
    assert measurement.seconds == pytest.approx(1.0, rel=0.01)


def test_equal_times_make_no_outliers_of_small_differences() -> None:
    measurement = ShapeTiming(SHAPE, (1.0, 1.0, 1.0, 1.0, 1.01))
    assert measurement.kept_s == measurement.runs_s


def test_no_run_starts_after_the_budget_but_one_is_timed() -> None:
    assert replay(5.0, 6.0, budget_s=3.0).runs_s == (6.0,)
    assert replay(1.0, 1.0, 1.5, budget_s=3.0).runs_s == (1.0, 1.5)


def test_repeat_error_is_the_mean_error_of_one_measurement() -> None:
    generator = random.Random(0)
    pairs = [StepShape(decodes=(context,)) for context in range(1, 2000)] * 2
    measurements = [ShapeTiming(shape, (generator.gauss(1, 0.03),)) for shape in pairs]
    mean_absolute_error = 0.03 * 0.79788  # √(2/π) standard deviations.
    assert repeat_error(measurements) == pytest.approx(mean_absolute_error, rel=0.05)


batches = st.builds(
    StepStats.of,
    st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 50_000)), max_size=4),
    st.lists(st.integers(1, 50_000), max_size=8),
).filter(lambda batch: not batch.is_empty)


eager_prices = st.fixed_dictionaries({name: st.floats(0, 1e-3) for name in EAGER}).filter(
    lambda prices: any(prices.values())
)


def has_kinds_of(batch: StepStats, known: StepStats) -> bool:
    return (batch.prefill_requests == 0 or known.prefill_requests > 0) and (
        batch.decode_requests == 0 or known.decode_requests > 0
    )


@given(eager_prices, st.lists(batches, min_size=1, max_size=5), batches)
def test_cost_bound_holds_for_any_prices(
    prices: dict[str, float], measured: list[StepStats], batch: StepStats
) -> None:
    model = PolynomialModel.of(**prices)
    bound = CostBound()
    for known in measured:
        bound.observe(known, model.predict(known))
    if any(has_kinds_of(batch, known) for known in measured):
        assert bound.seconds(batch) >= model.predict(batch) * (1 - 1e-9)
    else:
        assert bound.seconds(batch) == 0
    assert bound.seconds(measured[0]) == pytest.approx(model.predict(measured[0]))


def test_progress_shows_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    # Read twice at the start, then once for its share of the time and once or twice for the line.
    times_s = iter([0.0, 0.0, 4.0, 4.0, 11.0, 11.0, 11.0, 12.0, 12.0])
    with ProfileProgress(40, 100.0, clock=lambda: next(times_s)) as progress:
        for _ in range(3):
            progress.advance(ShapeTiming(SHAPE, (0.5,)))
    assert capfd.readouterr().err.splitlines() == [
        "profiling: 11%, 2 measured; P 64 × 1, decodes 0: 500.0 ms"
    ]
