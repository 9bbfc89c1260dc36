from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.modelled_executor import LIMITS, MACHINE, ModelledExecutor
from sglang_coserve.core.latency_model.model import LatencyModel, Sample
from sglang_coserve.profiler.fits import KINDS, fit_all
from sglang_coserve.profiler.shapes import ExecutorLimits, ShapeKind, StepShape, plan_grid

limits = st.builds(
    ExecutorLimits,
    max_batch_tokens=st.integers(1, 16384),
    max_request_tokens=st.integers(2, 131072),
    max_requests=st.integers(1, 512),
    kv_capacity_tokens=st.integers(64, 1_000_000),
    page_tokens=st.sampled_from([1, 16, 64]),
)


@settings(deadline=None, max_examples=50)
@given(limits)
def test_shapes_are_allowed_and_different(limits: ExecutorLimits) -> None:
    shapes = plan_grid(limits, 60)
    assert shapes
    assert len(set(shapes)) == len(shapes) <= 60
    assert all(limits.allow(shape) for shape in shapes)


@settings(deadline=None, max_examples=50)
@given(limits, st.integers(1, 60))
def test_a_shorter_grid_is_the_beginning_of_a_longer_one(limits: ExecutorLimits, n: int) -> None:
    assert plan_grid(limits, n) == plan_grid(limits, 60)[:n]


@pytest.mark.parametrize("num_shapes", [25, 60, 400])
def test_wherever_it_stops_every_kind_can_be_fitted(num_shapes: int) -> None:
    executor = ModelledExecutor()
    shapes = plan_grid(LIMITS, num_shapes)
    assert len(shapes) == num_shapes
    attempts = fit_all([Sample(s.stats, executor.run(s)) for s in shapes], MACHINE)
    assert [a.kind for a in attempts if a.fit is not None] == list(KINDS)


def test_the_grid_reaches_the_limits_in_every_direction() -> None:
    shapes = plan_grid(LIMITS)
    assert max(s.stats.prefill_tokens for s in shapes) == LIMITS.max_batch_tokens
    assert max(len(s.decodes) for s in shapes) == LIMITS.max_requests
    assert max(tokens for s in shapes for tokens in s.request_tokens()) == LIMITS.max_request_tokens
    assert {s.kind for s in shapes} == set(ShapeKind)
    mixed_prefills = [s for s in shapes if s.kind is ShapeKind.MIXED and len(s.prefills) > 1]
    assert any(len(set(s.decodes)) > 1 for s in mixed_prefills)


def test_early_shapes_are_small() -> None:
    def predict(model: LatencyModel, shape: StepShape) -> float:
        return model.predict(shape.stats)

    shapes = plan_grid(LIMITS)
    model = ModelledExecutor().model
    early = max(predict(model, shape) for shape in shapes[:20])
    assert early < 0.2 * max(predict(model, shape) for shape in shapes)


@pytest.mark.parametrize(
    ("shape", "allowed"),
    [
        (StepShape(prefills=((48, 16),)), True),
        (StepShape(prefills=((49, 0),)), False),
        (StepShape(prefills=((40, 0),), decodes=(1,) * 9), False),
        (StepShape(decodes=(99,)), True),
        (StepShape(decodes=(100,)), False),
        (StepShape(decodes=(15,) * 10), True),
        (StepShape(decodes=(15,) * 11), False),
        (StepShape(decodes=(16,) * 10), True),
        (StepShape(decodes=(32,) * 7), False),
    ],
)
def test_limits(shape: StepShape, allowed: bool) -> None:
    limits = ExecutorLimits(
        max_batch_tokens=48,
        max_request_tokens=100,
        max_requests=10,
        kv_capacity_tokens=320,
        page_tokens=16,
    )
    assert limits.allow(shape) is allowed
