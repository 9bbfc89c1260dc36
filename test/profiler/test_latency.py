from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from profiler.modelled_executor import LIMITS, MACHINE, POLYNOMIAL, ModelledExecutor
from sglang_coserve.core.latency_model.model import SampleTable
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.profiler.fits import choose, fit_all
from sglang_coserve.profiler.latency import LEAST_SHAPES, ShapeTiming, measure_grid, repeat_error
from sglang_coserve.profiler.shapes import ShapeKind, StepShape, plan_grid

SHAPES = plan_grid(LIMITS, 100)


def run(
    executor: ModelledExecutor,
    time_limit_s: float,
    shapes: Sequence[StepShape] = SHAPES,
    **more: int,
) -> list[ShapeTiming]:
    limit = {"time_limit_s": time_limit_s, "clock": executor.clock}
    return list(measure_grid(executor, shapes, **limit, **more))


def test_with_time_enough_every_shape_is_measured_and_some_again() -> None:
    measurements = run(ModelledExecutor(noise=0.02), 10_000)
    shapes = [measurement.shape for measurement in measurements]
    assert set(shapes) == set(SHAPES)
    assert len(shapes) - len(SHAPES) == len(SHAPES) // 8
    error = repeat_error(measurements)
    assert 0.001 < error < 0.02


@pytest.mark.parametrize("time_limit_s", [1, 5, 20, 60])
def test_the_time_limit_is_kept(time_limit_s: float) -> None:
    executor = ModelledExecutor(noise=0.02)
    assert run(executor, time_limit_s)
    # The last shape's runs end within its budget, the last one may end later.
    assert executor.clock() <= time_limit_s * 1.05


def test_quick_samples_determine_the_machine() -> None:
    executor = ModelledExecutor(noise=0.01)
    measured = run(executor, 10.0, plan_grid(LIMITS))
    fitted = PolynomialModel.of().fit(SampleTable.of([each.sample for each in measured])).model
    for shape in SHAPES:
        if shape.kind is not ShapeKind.DECODE or len(shape.decodes) < 32:
            exact = POLYNOMIAL.predict(shape.stats)
            assert fitted.predict(shape.stats) == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("limit_s", [1e-9, 0.3])
def test_a_machine_that_is_too_slow_for_the_limit_still_gets_a_model(limit_s: float) -> None:
    others = {"architectures": ["GemmaForCausalLM"]}  # No datasheet model could stand in.
    executor = ModelledExecutor(noise=0.05)
    measured = run(executor, limit_s, plan_grid(LIMITS), at_least=LEAST_SHAPES)
    fit = choose(fit_all([each.sample for each in measured], replace(MACHINE, model_config=others)))
    for shape in executor.runs:
        assert fit.model.predict(shape.stats) == pytest.approx(
            POLYNOMIAL.predict(shape.stats), rel=0.3
        )
