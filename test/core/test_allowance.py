"""What the allowance learns from latencies, alone and on a simulated queue."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allowance_bench.queue import QueueSetting, run
from sglang_coserve.core.control.allowance import Allowance
from sglang_coserve.core.control.slo import parse_slo
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.metrics import SloTargets

INFO = RequestInfo("a", RequestClass.ONLINE, 10, 64, arrival_s=0.0)


def allowance(*slos: str) -> Allowance:
    return Allowance([parse_slo(slo) for slo in slos], ttft_prior_s=0.2, gap_prior_s=0.02)


def test_without_slos_nothing_is_bounded() -> None:
    free = allowance()
    assert (free.arrival_s, free.gap_share, free.targets) == (math.inf, 1.0, SloTargets())


def test_the_least_of_several_targets_counts() -> None:
    several = allowance(
        "ttft p99 <= 1s", "ttft p50 <= 400ms", "tbt p99 <= 60ms", "tpot p99 <= 50ms"
    )
    assert several.targets == SloTargets(0.4, 0.05)
    assert several.arrival_s == pytest.approx(0.4 / 8)


def test_what_is_late_alone_is_not_held_against_offline_work() -> None:
    seen = allowance("ttft p99 <= 300ms")
    before_s = seen.arrival_s
    seen.first_token(INFO, 0.5, 0.4, 0.0)
    assert seen.arrival_s >= before_s
    seen.first_token(INFO, 0.5, 0.2, 0.0)
    assert seen.arrival_s < before_s


def test_a_request_is_held_to_its_own_target() -> None:
    own = RequestInfo("b", RequestClass.ONLINE, 10, 64, arrival_s=0.0, ttft_target_s=0.1)
    seen = allowance("ttft p99 <= 300ms")
    before_s = seen.arrival_s
    seen.first_token(own, 0.2, 0.05, 0.0)
    assert seen.arrival_s < before_s


def test_each_slo_learns_from_its_own_latency() -> None:
    seen = allowance("ttft p99 <= 300ms", "tbt p99 <= 60ms", "tpot p99 <= 50ms")
    for _ in range(1000):
        seen.gaps([(INFO, 0.01, 0.01)], 0.0)
    arrival_s, share = seen.arrival_s, seen.gap_share
    seen.gaps([(INFO, 0.07, 0.01)], 0.0)
    assert (seen.arrival_s, seen.gap_share < share) == (arrival_s, True)
    while seen.gap_share <= (share := 0.5):
        seen.gaps([(INFO, 0.01, 0.01)], 0.0)
    for _ in range(10):
        seen.finished(INFO, 0.07, 0.01, 0.0)
    assert (seen.arrival_s, seen.gap_share < share) == (arrival_s, True)


def test_offline_work_begins_with_little_where_single_gaps_count() -> None:
    """A mean over a request's gaps is held by deadlines alone."""
    assert allowance("tpot p99 <= 50ms", "tpot mean <= 50ms").gap_share == 1.0
    for slo in ("tbt p99 <= 60ms", "tbt p99 <= +10%"):
        assert allowance(slo).gap_share == pytest.approx(1 / 64)


def test_a_tolerance_follows_the_same_statistic_of_what_requests_get_alone() -> None:
    seen = allowance("ttft p99 <= +10%", "tbt p99 <= +50%")
    assert seen.targets == SloTargets(pytest.approx(0.22), pytest.approx(0.03))
    for number in range(1000):
        seen.first_token(INFO, 0.1, 0.1, 0.0)
        seen.gaps([(INFO, 0.01, 0.04 if number % 20 == 0 else 0.01)], 0.0)
    assert seen.targets == SloTargets(pytest.approx(0.11, rel=0.01), pytest.approx(0.06, rel=0.01))


def stalled(*, alone: bool) -> Allowance:
    """One gap in 150 is a stall; alone another one, or none."""
    seen = allowance("tbt p99 <= +10%")
    for number in range(6000):
        measured_s = 0.05 if number % 150 == 0 else 0.01
        alone_s = 0.05 if alone and number % 150 == 75 else 0.01
        seen.gaps([(INFO, measured_s, alone_s)] * 2, 0.0)
    return seen


def test_stalls_count_against_those_alone_whichever_gaps_they_are_in() -> None:
    seen = stalled(alone=True)
    opened = seen.gap_share
    assert opened > allowance("tbt p99 <= +10%").gap_share
    for number in range(6000):
        seen.gaps([(INFO, 0.05 if number % 30 == 0 else 0.01, 0.01)] * 2, 0.0)
    assert seen.gap_share < opened / 2


def test_a_relative_target_judges_nobody_before_it_is_known() -> None:
    """A hundred requests have one that is in the tail of a hundredth."""
    seen = allowance("ttft p99 <= +10%")
    for _ in range(99):
        seen.first_token(INFO, 0.2, 0.1, 0.0)
    share = seen.arrival_s / seen.targets.ttft_s
    for _ in range(10):
        seen.first_token(INFO, 0.2, 0.1, 0.0)
    assert share == pytest.approx(1 / 8)
    assert seen.arrival_s / seen.targets.ttft_s < 0.9 * share


@pytest.mark.parametrize(("ttft_s", "rises"), [(0.15, True), (0.25, False)])
def test_a_mean_is_held_by_how_far_it_is_missed(ttft_s: float, rises: bool) -> None:
    seen = allowance("ttft mean <= 200ms")
    before_s = seen.arrival_s
    seen.first_token(INFO, ttft_s, 0.1, 0.0)
    assert (seen.arrival_s > before_s) == rises


@given(
    st.lists(
        st.tuples(st.floats(1e-3, 10), st.none() | st.floats(1e-3, 10), st.integers(1, 40)),
        max_size=30,
    ),
    st.sampled_from(["<= 100ms", "<= +10%"]),
    st.sampled_from(["p50", "p90", "p99", "mean"]),
)
def test_whatever_happens_it_stays_finite_and_positive(
    seen: list[tuple[float, float | None, int]], limit: str, statistic: str
) -> None:
    learned = allowance(*(f"{name} {statistic} {limit}" for name in ("ttft", "tpot", "tbt")))
    for measured_s, alone_s, count in seen:
        learned.first_token(INFO, measured_s, alone_s, 0.0)
        learned.gaps([(INFO, measured_s, alone_s)] * count, 0.0)
        learned.finished(INFO, measured_s, alone_s, 0.0)
        assert 0 < learned.arrival_s < math.inf
        assert 0 < learned.gap_share <= 1


@pytest.mark.parametrize("load", [0.2, 0.5])
@pytest.mark.parametrize("scale", [1.2, 1.5])
def test_a_simulated_queue_has_one_harmed_request_in_a_hundred(load: float, scale: float) -> None:
    """``benchmark/bench_allowance.py`` runs all settings."""
    got = run(QueueSetting(load, scale, noise=0.05, seed=1, requests=6000))
    assert 0.005 <= got.harmed <= 0.015
    assert got.offline > 0.4


def test_slow_spells_of_the_machine_are_not_held_against_offline_work() -> None:
    got = run(QueueSetting(0.5, 1.2, noise=0.1, has_slow_spells=True, seed=1, requests=6000))
    assert 0.005 <= got.harmed <= 0.015
    assert got.offline > 0.3
