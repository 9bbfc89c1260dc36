"""The factor that holds a harmed share."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.core.control.integrator import Integrator


@pytest.mark.parametrize("allowed", [0.01, 0.1, 0.5])
def test_as_much_is_harmed_as_is_allowed(allowed: float) -> None:
    """An observation is harmed with the probability of the factor's square."""
    rng = random.Random(7)
    integrator = Integrator(allowed, first=0.1)
    harmed = 0
    for _ in range(20_000):
        is_harmed = rng.random() < integrator.factor**2
        harmed += is_harmed
        integrator.observe(is_harmed)
    assert harmed / 20_000 == pytest.approx(allowed, rel=0.15)


@given(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(0.01, 5))),
    st.floats(0, 0.5),
    st.floats(1 / 64, 1),
)
def test_the_factor_stays_in_its_range(
    seen: list[tuple[float, float]], allowed: float, most: float
) -> None:
    integrator = Integrator(allowed, first=1 / 64, most=most)
    for harmed, weight in seen:
        integrator.observe(harmed, weight)
        assert 1 / 64 * 0.999 <= integrator.factor <= most * 1.001


@given(st.integers(0, 50), st.floats(0.1, 3))
def test_harm_never_raises_it_and_its_absence_never_lowers_it(times: int, weight: float) -> None:
    integrator = Integrator(0.01, first=0.5)
    for _ in range(times):
        integrator.observe(0.0)
    before = integrator.factor
    integrator.observe(0.0, weight)
    raised = integrator.factor
    integrator.observe(1.0, weight)
    assert integrator.factor < raised
    assert raised >= before


def test_it_opens_fast_until_something_is_harmed() -> None:
    cold, warm = (Integrator(0.01, first=1 / 8) for _ in range(2))
    warm.observe(1.0)
    start = warm.factor
    for _ in range(50):
        cold.observe(0.0)
        warm.observe(0.0)
    assert cold.factor > 2 / 8
    made_up = Integrator(0.01, first=1 / 8)
    made_up.observe(-1.0)
    assert made_up.factor < 1.3 / 8
    assert warm.factor < 1.2 * start
