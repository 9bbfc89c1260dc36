"""Limits that SLOs set to online latencies, and the time that they leave to offline work."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.core.control.allowance import Allowance, Targets
from sglang_coserve.core.control.slo import parse_slo
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.snapshot import RequestInfo

INFO = RequestInfo("a", RequestClass.ONLINE, 10, 64, arrival_s=0.0)


def allowance(*slos: str) -> Allowance:
    return Allowance([parse_slo(slo) for slo in slos], ttft_prior_s=0.2, gap_prior_s=0.02)


def first_tokens(seen: Allowance, count: int, alone_s: float, own_s: float | None = None) -> None:
    info = RequestInfo("a", RequestClass.ONLINE, 10, 64, 0.0, ttft_target_s=own_s)
    for _ in range(count):
        seen.first_token(info, alone_s, 0.0)


def test_without_slos_nothing_is_bounded() -> None:
    free = allowance()
    assert (free.arrival_s, free.targets, free.is_relative) == (math.inf, Targets(), True)


def test_the_least_of_several_targets_counts() -> None:
    several = allowance(
        *("ttft p99 <= 1s", "ttft p50 <= 400ms", "tbt p99 <= 60ms"),
        *("tbt p50 <= 40ms", "tpot p99 <= 50ms", "tpot mean <= 80ms"),
    )
    assert several.targets == Targets(ttft_s=0.4, tpot_s=0.05, gap_s=0.04)
    assert several.arrival_s == pytest.approx(0.2)
    assert not several.is_relative


@pytest.mark.parametrize(
    ("targets", "token_s"),
    [
        (Targets(), None),
        (Targets(ttft_s=1.0), None),
        (Targets(tpot_s=0.05), 0.05),
        (Targets(gap_s=0.06), 0.06),
        (Targets(tpot_s=0.05, gap_s=0.06), 0.05),
        (Targets(tpot_s=0.07, gap_s=0.06), 0.06),
    ],
)
def test_one_limit_per_token_is_the_stricter_of_two(
    targets: Targets, token_s: float | None
) -> None:
    assert targets.token_s == token_s


def test_an_arrival_may_wait_for_what_the_target_leaves_before_anything_is_known() -> None:
    seen = allowance("ttft p99 <= 300ms")
    assert seen.arrival_s == pytest.approx(0.1)
    first_tokens(seen, 100, 0.2)
    assert seen.arrival_s == pytest.approx(0.1, rel=0.01)


def test_half_of_the_target_is_the_most_that_an_arrival_waits() -> None:
    """For the rest of a step, and then for the step that serves it."""
    seen = allowance("ttft p99 <= 300ms")
    first_tokens(seen, 100, 0.01)
    assert seen.arrival_s == pytest.approx(0.15)


def test_a_tolerance_follows_the_same_statistic_of_what_requests_get_alone() -> None:
    seen = allowance("ttft p99 <= +10%", "tbt p99 <= +50%", "tpot p50 <= +20%")
    assert seen.targets == pytest.approx((0.22, 0.024, 0.03))
    for number in range(1000):
        seen.first_token(INFO, 0.1, 0.0)
        seen.gaps({(None, 0.04 if number % 20 == 0 else 0.01): 1}, 0.0)
        seen.finished(INFO, 0.03 if number % 20 == 0 else 0.01, 0.0)
    assert seen.targets == pytest.approx((0.11, 0.012, 0.06), rel=0.01)
    assert seen.arrival_s == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize(("tolerance", "added_s"), [("10%", 0.025), ("50%", 0.125), ("0%", 0.0)])
def test_a_tolerance_of_the_tail_adds_at_most_two_and_a_half_tolerances_of_the_median(
    tolerance: str, added_s: float
) -> None:
    """Chats that find their history in the cache have tails far above their median."""
    seen = allowance(f"ttft p99 <= +{tolerance}")
    for number in range(1000):
        seen.first_token(INFO, 1.0 if number % 20 == 0 else 0.1, 0.0)
    assert seen.arrival_s == pytest.approx(added_s, rel=0.02)


@pytest.mark.parametrize(("statistic", "left_s"), [("p50", 0.09), ("p90", 0.05), ("mean", 0.0844)])
def test_an_arrival_may_wait_for_what_is_left_above_the_statistic_of_the_slo(
    statistic: str, left_s: float
) -> None:
    seen = allowance(f"ttft {statistic} <= 100ms", "ttft p99 <= 10s")
    for number in range(1000):
        seen.first_token(INFO, 0.05 if number % 7 == 0 else 0.01, 0.0)
    assert seen.arrival_s == pytest.approx(min(left_s, 0.05), rel=0.02)


def test_a_ttft_target_that_the_baseline_misses_leaves_a_share_of_itself() -> None:
    seen = allowance("ttft p99 <= 300ms", "tbt p99 <= 60ms")
    for number in range(1000):
        seen.first_token(INFO, 0.4 if number % 20 == 0 else 0.1, 0.0)
        seen.gaps({(None, 0.2 if number % 20 == 0 else 0.01): 1}, 0.0)
    assert seen.arrival_s == pytest.approx(0.3 / 22)
    assert seen.targets == Targets(ttft_s=0.3, gap_s=0.06)


def test_the_baseline_tells_how_long_prompts_stall_streams() -> None:
    seen = allowance()
    assert seen.stall_s == 0.02
    for number in range(1000):
        seen.gaps({(None, 0.2 if number % 20 == 0 else 0.01): 1}, 0.0)
    assert seen.stall_s == pytest.approx(0.2, rel=0.01)


def test_a_target_that_most_miss_alone_bounds_nothing_until_they_meet_it() -> None:
    seen = allowance("ttft p99 <= 100ms", "ttft p99 <= 1s")
    first_tokens(seen, 400, 0.2)
    assert seen.targets.ttft_s == 1.0
    assert seen.arrival_s == pytest.approx(0.5)
    first_tokens(seen, 500, 0.08)
    assert seen.targets.ttft_s == 0.1
    assert seen.arrival_s == pytest.approx(0.1 / 22)


def test_a_share_of_the_ttft_alone_is_left_where_all_targets_are_missed_alone() -> None:
    seen = allowance("ttft p99 <= 100ms", "tbt p99 <= 5ms", "tpot p99 <= 5ms")
    first_tokens(seen, 400, 0.2)
    seen.gaps({(None, 0.02): 400}, 0.0)
    assert seen.targets == Targets()
    assert seen.arrival_s == pytest.approx(0.2 / 22, rel=0.02)


def test_targets_that_requests_bring_along_count_unless_they_could_not_be_met() -> None:
    seen = allowance("ttft p99 <= 300ms")
    first_tokens(seen, 100, 0.05, own_s=0.01)
    assert seen.arrival_s == pytest.approx(0.15)
    first_tokens(seen, 100, 0.05, own_s=0.08)
    assert seen.arrival_s == pytest.approx(0.03, rel=0.02)


@pytest.mark.parametrize(("slos", "else_s"), [((), math.inf), (("ttft p99 <= 10s",), 5.0)])
@pytest.mark.parametrize(("before", "after"), [(0, 60), (50, 10), (0, 200), (200, 10)])
def test_what_a_hundredth_of_the_requests_bring_along_does_not_count(
    slos: tuple[str, ...], else_s: float, before: int, after: int
) -> None:
    """They may be harmed, as under an SLO for P99."""
    seen = allowance(*slos)
    first_tokens(seen, before, 0.01)
    first_tokens(seen, 1, 0.01, own_s=0.1)
    first_tokens(seen, after, 0.01)
    is_rare = before + after >= 200
    assert seen.arrival_s == pytest.approx(else_s if is_rare else 0.09, rel=0.02)


@given(
    st.lists(st.tuples(st.floats(1e-3, 10), st.integers(1, 40)), max_size=30),
    st.sampled_from(["<= 100ms", "<= +10%"]),
    st.sampled_from(["p50", "p90", "p99", "mean"]),
    st.none() | st.floats(1e-300, 10),
)
def test_no_limit_is_negative(
    seen: list[tuple[float, int]], limit: str, statistic: str, own_s: float | None
) -> None:
    learned = allowance(*(f"{name} {statistic} {limit}" for name in ("ttft", "tpot", "tbt")))
    free = allowance()
    own = RequestInfo("b", RequestClass.ONLINE, 10, 64, 0.0, ttft_target_s=own_s)
    for alone_s, count in seen:
        for info in (INFO, own):
            learned.first_token(info, alone_s, 0.0)
            free.first_token(info, alone_s, 0.0)
        learned.gaps({(None, alone_s): count}, 0.0)
        learned.finished(INFO, alone_s, 0.0)
        assert learned.arrival_s >= 0
        assert all(limit_s is None or limit_s > 0 for limit_s in learned.targets)
        assert min(learned.stall_s, free.stall_s) > 0
        assert free.arrival_s > 0


@pytest.mark.parametrize("slo", ["ttft p99 <= +10%", "ttft p99 <= 10s", "tbt p99 <= +50%"])
def test_a_tightened_allowance_adds_no_more_and_keeps_its_limits(slo: str) -> None:
    bounded = allowance(slo)
    first_tokens(bounded, 100, alone_s=4.0)
    before = bounded.targets
    assert bounded.arrival_s > 0.03
    bounded.tighten(0.03)
    assert (bounded.arrival_s, bounded.targets) == (0.03, before)


def test_tightening_loosens_nothing_and_bounds_nothing_without_targets() -> None:
    strict, free = allowance("ttft p99 <= +10%"), allowance()
    least_s = strict.arrival_s
    strict.tighten(1.0)
    free.tighten(1.0)
    assert (strict.arrival_s, free.arrival_s) == (least_s, math.inf)
