"""OOCO's Algorithm 1: which length an instance should pull."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.core.bottleneck import is_compute_saturated, saturated_batch_size
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.migration import preferred_length, requests_to_pull, step_bound_s
from sglang_coserve.core.step_stats import StepStats

# Saturates where 20 µs a request exceed the 6.4 ms all share: at 320, so 512 of the powers.
MODEL = PolynomialModel.of(compute_token_s=2e-5, context_token_s=1e-7, iteration_s=0.0064)


def prefer(
    decodes: int, slo_s: float, *, free: int = 1_000_000, includes_all: bool = True
) -> tuple[int, int] | None:
    batch = StepStats.of(decodes=[100] * decodes)
    return preferred_length(MODEL, batch, slo_s, free, includes_all=includes_all)


def test_the_saturated_size_is_where_requests_cost_what_all_share() -> None:
    assert saturated_batch_size(MODEL) == 512
    assert not is_compute_saturated(MODEL, 256)
    assert not is_compute_saturated(MODEL, 0)


def test_nothing_is_pulled_without_time_or_with_requests_left_out() -> None:
    assert prefer(100, 0.005) is None
    assert prefer(100, 0.1, includes_all=False) is None
    assert prefer(100, 0.1, free=0) is None


def test_a_saturated_batch_pulls_the_longest_that_fits() -> None:
    preference = prefer(600, 0.1)
    assert preference[0] == preference[1]
    assert prefer(600, 0.1, free=50) == (50, 50)


def test_a_small_batch_that_cannot_saturate_pulls_the_shortest() -> None:
    preference = prefer(10, 0.010)
    assert preference[0] == 1 < preference[1]


def test_a_batch_that_can_saturate_pulls_the_longest_that_lets_it() -> None:
    preference = prefer(500, 0.1)
    assert 1 < preference[0] < preference[1]


def test_the_closest_to_the_preference_migrate() -> None:
    lengths = {"a": 10, "b": 90, "c": 120, "d": 460, "e": 99}
    assert requests_to_pull(lengths, 100, 400, most=3) == ["e", "b", "c"]
    assert requests_to_pull(lengths, 100, 400, most=3, coming_tokens=200) == ["e", "b", "a"]


def test_a_decode_step_may_take_its_target_and_at_least_the_time_of_its_online_decodes() -> None:
    online = StepStats.of(decodes=[100] * 10)
    online_s = MODEL.predict(online)
    assert step_bound_s(MODEL, online, 2 * online_s) == 2 * online_s
    assert step_bound_s(MODEL, online, online_s / 2) == online_s
    assert step_bound_s(MODEL, StepStats(), 0.05) == 0.05
    assert step_bound_s(MODEL, online, None) == math.inf


@given(
    st.lists(st.integers(1, 300)), st.integers(1, 200), st.integers(0, 500), st.integers(0, 1500)
)
def test_what_is_pulled_fits_together_and_nothing_that_fits_is_left(
    lengths: list[int], tokens: int, more: int, coming_tokens: int
) -> None:
    named = dict(enumerate(lengths))
    pulled = requests_to_pull(named, tokens, tokens + more, most=8, coming_tokens=coming_tokens)
    left_tokens = tokens + more - coming_tokens - sum(named.pop(n) for n in pulled)
    assert len(set(pulled)) == len(pulled) <= 8
    assert left_tokens >= 0 or not pulled
    assert len(pulled) == 8 or all(length > left_tokens for length in named.values())


@given(st.integers(1, 1000), st.floats(0.001, 0.5), st.integers(0, 10**6))
def test_what_is_preferred_fits(decodes: int, slo_s: float, free: int) -> None:
    batch = StepStats.of(decodes=[100] * decodes)
    preference = prefer(decodes, slo_s, free=free)
    if preference is not None:
        preferred, longest = preference
        assert 1 <= preferred <= longest <= free
        assert MODEL.predict(batch.with_decode(longest - 1)) <= slo_s
        if longest < free:
            assert MODEL.predict(batch.with_decode(longest)) > slo_s
