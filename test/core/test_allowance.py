"""What offline work may add to the latencies of online requests."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.core.control.latency_account import Allowance
from sglang_coserve.core.control.slo import parse_slo
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.metrics import SloTargets

INFO = RequestInfo("a", RequestClass.ONLINE, 10, 64, arrival_s=0.0)


def allowance(*slos: str) -> Allowance:
    return Allowance([parse_slo(slo) for slo in slos], ttft_prior_s=0.2, gap_prior_s=0.02)


def first_tokens(seen: Allowance, count: int, measured_s: float, alone_s: float) -> None:
    for _ in range(count):
        seen.first_token(INFO, measured_s, alone_s, 0.0)


def test_without_slos_nothing_is_bounded() -> None:
    free = allowance()
    assert (free.arrival_s, free.prompt_s, free.gap_s(0.3)) == (math.inf, math.inf, 0.3)
    assert (free.gap_share, free.targets, free.is_relative) == (1.0, SloTargets(), True)


def test_the_least_of_several_targets_counts() -> None:
    several = allowance(
        "ttft p99 <= 1s", "ttft p50 <= 400ms", "tbt p99 <= 60ms", "tpot p99 <= 50ms"
    )
    assert several.targets == SloTargets(0.4, 0.05)
    assert several.arrival_s == pytest.approx(0.2)
    assert not several.is_relative


def test_what_the_target_leaves_may_always_be_added() -> None:
    """No value is known to be late or in time: nothing has to be learned first."""
    seen = allowance("ttft p99 <= 300ms", "tbt p99 <= 60ms")
    assert seen.prompt_s == pytest.approx(0.1)
    assert seen.gap_s(0.05) == pytest.approx(0.04)
    first_tokens(seen, 100, 0.2, alone_s=0.05)
    assert seen.prompt_s == pytest.approx(0.25, rel=0.01)


def test_a_tolerance_follows_the_same_statistic_of_what_requests_get_alone() -> None:
    seen = allowance("ttft p99 <= +10%", "tbt p99 <= +50%")
    assert seen.targets == SloTargets(pytest.approx(0.22), pytest.approx(0.03))
    for number in range(1000):
        seen.first_token(INFO, 0.1, 0.1, 0.0)
        seen.gaps([(INFO, 0.01, 0.04 if number % 20 == 0 else 0.01)], 0.0)
    assert seen.targets == SloTargets(pytest.approx(0.11, rel=0.01), pytest.approx(0.06, rel=0.01))
    assert seen.prompt_s == pytest.approx(0.01, rel=0.02)


def test_more_than_the_target_leaves_is_added_from_values_that_were_in_time() -> None:
    seen = allowance("ttft p99 <= 300ms")
    first_tokens(seen, 400, 0.2, alone_s=0.2)
    assert seen.prompt_s == pytest.approx(0.1, rel=0.05)
    assert seen.arrival_s == pytest.approx(0.15, rel=0.02)


def test_a_debt_reduces_what_is_added_until_it_is_paid() -> None:
    seen = allowance("ttft p99 <= 300ms")
    first_tokens(seen, 100, 0.2, alone_s=0.2)
    first_tokens(seen, 8, 0.4, alone_s=0.2)
    assert seen.prompt_s == seen.arrival_s == pytest.approx(0.1 / 8, rel=0.05)
    first_tokens(seen, 800, 0.2, alone_s=0.2)
    assert seen.prompt_s == pytest.approx(0.1, rel=0.05)


def test_what_is_late_alone_is_not_held_against_offline_work() -> None:
    def after(alone_s: float) -> float:
        seen = allowance("ttft p99 <= 300ms")
        first_tokens(seen, 400, 0.2, alone_s=0.2)
        first_tokens(seen, 3, 0.4, alone_s=alone_s)
        return seen.arrival_s

    assert after(0.4) > after(0.2)


def test_stalls_count_against_those_alone_whichever_gaps_they_are_in() -> None:
    """One gap in 150 is a stall; alone another one."""
    seen = allowance("tbt p99 <= +10%")
    for number in range(6000):
        measured_s = 0.05 if number % 150 == 0 else 0.01
        alone_s = 0.05 if number % 150 == 75 else 0.01
        seen.gaps([(INFO, measured_s, alone_s)] * 2, 0.0)
    assert seen.gap_s(0.05) > 0.003
    for number in range(6000):
        seen.gaps([(INFO, 0.05 if number % 30 == 0 else 0.01, 0.01)] * 2, 0.0)
    assert 0 < seen.gap_s(0.05) < 0.001


def test_a_target_that_most_miss_alone_counts_as_ten_percent_more_than_alone() -> None:
    seen = allowance("ttft p99 <= 100ms")
    first_tokens(seen, 400, 0.2, alone_s=0.2)
    assert seen.targets.ttft_s == pytest.approx(0.22, rel=0.01)
    assert seen.prompt_s == pytest.approx(0.02, rel=0.01)


def test_each_slo_has_an_account_of_its_own_latency() -> None:
    seen = allowance("ttft p99 <= 300ms", "tbt p99 <= 60ms")
    arrival_s, gap_s = seen.arrival_s, seen.gap_s(0.05)
    for _ in range(200):
        seen.gaps([(INFO, 0.07, 0.02)], 0.0)
    assert (seen.arrival_s, seen.gap_s(0.05) < gap_s) == (arrival_s, True)


def test_a_mean_is_held_by_how_far_it_is_missed() -> None:
    for ttft_s, is_more in ((0.15, True), (0.25, False)):
        seen = allowance("ttft mean <= 200ms")
        first_tokens(seen, 10, 0.2, alone_s=0.19)
        before_s = seen.arrival_s
        first_tokens(seen, 10, ttft_s, alone_s=0.19)
        assert (seen.arrival_s > before_s) is is_more


@given(
    st.lists(
        st.tuples(st.floats(1e-3, 10), st.none() | st.floats(1e-3, 10), st.integers(1, 40)),
        max_size=30,
    ),
    st.sampled_from(["<= 100ms", "<= +10%"]),
    st.sampled_from(["p50", "p90", "p99", "mean"]),
    st.none() | st.floats(1e-300, 10),
)
def test_whatever_happens_it_stays_within_its_bounds(
    seen: list[tuple[float, float | None, int]], limit: str, statistic: str, own_s: float | None
) -> None:
    learned = allowance(*(f"{name} {statistic} {limit}" for name in ("ttft", "tpot", "tbt")))
    free = allowance()
    own = RequestInfo("b", RequestClass.ONLINE, 10, 64, 0.0, ttft_target_s=own_s)
    for measured_s, alone_s, count in seen:
        for info in (INFO, own):
            learned.first_token(info, measured_s, alone_s, 0.0)
            free.first_token(info, measured_s, alone_s, 0.0)
        learned.gaps([(INFO, measured_s, alone_s)] * count, 0.0)
        learned.finished(INFO, measured_s, alone_s, 0.0)
        assert learned.prompt_s >= 0
        assert 0 <= learned.arrival_s < math.inf
        assert 0 <= learned.gap_s(0.05) <= 0.05
        assert 0 <= learned.gap_share <= 1
