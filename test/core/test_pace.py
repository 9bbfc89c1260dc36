"""The pace of streams: the longest step with online decodes where no target bounds their gaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.latency_model.latency_cases import EAGER_POLYNOMIAL, POLYNOMIAL, ROOFLINE
from sglang_coserve.core.control.pace import pace_s
from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.step_stats import StepStats

# 10 ms a step, 0.1 ms a token.
MODEL = PolynomialModel.of(compute_token_s=1e-4, iteration_s=0.010)


def decodes(count: int, context_tokens: int = 100) -> StepStats:
    return StepStats.of(decodes=[context_tokens] * count)


def test_streams_with_a_slowdown_of_100_percent_keep_half_of_their_speed() -> None:
    ten = decodes(10)
    assert pace_s(MODEL, ten, 10, 1.0) == pytest.approx(2 * MODEL.predict(ten))
    assert pace_s(MODEL, ten, 10, 0.5) == pytest.approx(1.5 * MODEL.predict(ten))


@pytest.mark.parametrize("count", [11, 30, 60])
def test_more_decodes_than_alone_do_not_raise_the_pace(count: int) -> None:
    assert pace_s(MODEL, decodes(count), 10, 1.0) == pytest.approx(
        pace_s(MODEL, decodes(10), 10, 1)
    )


def test_keys_of_more_decodes_than_alone_count_in_proportion() -> None:
    model = PolynomialModel.of(context_token_s=1e-6, iteration_s=0.010)
    alone_s = pace_s(model, decodes(10, 2000), 10, 1.0)
    assert alone_s > 2.5 * 0.010
    assert pace_s(model, decodes(15, 2000), 10, 1.0) == pytest.approx(alone_s)


def test_decodes_that_alone_exceed_the_pace_leave_a_tenth_of_their_time() -> None:
    many = decodes(400)
    assert pace_s(MODEL, many, 10, 1.0) == pytest.approx(1.1 * MODEL.predict(many))


@pytest.mark.parametrize("num_alone", [0, 11, 1000])
def test_no_more_decodes_than_there_are_count_as_alone(num_alone: int) -> None:
    """The baseline is a little behind, so that it may still lack the decodes of the engine."""
    assert pace_s(MODEL, decodes(10), num_alone, 1.0) == pace_s(MODEL, decodes(10), 10, 1.0)


def test_half_of_the_added_time_is_work_where_prompts_have_a_launch_cost() -> None:
    launch_s = 0.030
    model = PolynomialModel.of(compute_token_s=1e-4, iteration_s=0.010, prefill_request_s=launch_s)
    few = decodes(10)
    added_s = pace_s(model, few, 10, 1.0) - model.predict(few)
    assert added_s == pytest.approx(2 * (launch_s + 1e-4))
    assert pace_s(model, few, 10, 6.0) == pytest.approx(7 * model.predict(few))


@given(
    model=st.sampled_from([MODEL, EAGER_POLYNOMIAL, POLYNOMIAL, ROOFLINE]),
    contexts=st.lists(st.integers(1, 50_000), min_size=1, max_size=200),
    num_alone=st.integers(0, 300),
    slowdowns=st.lists(st.floats(0, 20), min_size=2, max_size=2).map(sorted),
)
def test_a_larger_slowdown_allows_longer_steps_and_each_holds_the_decodes(
    model: LatencyModel, contexts: list[int], num_alone: int, slowdowns: list[float]
) -> None:
    online = StepStats.of(decodes=contexts)
    less_s, more_s = (pace_s(model, online, num_alone, slowdown) for slowdown in slowdowns)
    assert model.predict(online) <= less_s <= more_s
