"""Deadlines of the tokens of streams: by TPOT targets, by gap targets, and by the pace."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.scheduler.policy_exceptions import LATENCY_POLICIES
from core.scheduler.scenarios import MODEL, NO_CACHE, online, queued, scheduler, snapshot
from sglang_coserve.core.policies import POLICIES
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step import Bound, StepPlan
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.metrics import SloTargets

DECODING = RequestState.DECODING
TPOT_S = 0.1
TPOT = ("tpot p99 <= 100ms",)
PAPERS = {"conserve", "hygen", "bros", "ooco"}


def stream(
    tokens: int, first_s: float, last_s: float = 0.0, tpot_s: float | None = None
) -> Request:
    """A stream that has had some tokens before 0 s."""
    return online(
        *(100, DECODING),
        generated=tokens,
        first_token_s=first_s,
        last_token_s=last_s,
        tpot_s=tpot_s,
    )


def plan_beside(
    *streams: Request, slos: Sequence[str] = TPOT, policy: str = "coserve", now_s: float = 0.0
) -> StepPlan:
    """The plan of a step beside more offline work than fits."""
    brain = scheduler(policy, queued(9000), slos=slos)
    return brain.plan(snapshot(*streams, now_s=now_s), NO_CACHE)


def budget_s(*streams: Request, slos: Sequence[str] = TPOT, now_s: float = 0.0) -> float:
    """The longest time of a step beside these streams."""
    plan = plan_beside(*streams, slos=slos, now_s=now_s)
    assert plan.bound_by is Bound.GAP
    assert plan.predicted_s <= plan.budget_s
    return plan.budget_s


# --- TPOT targets are means of a request ------------------------------------------------------


@pytest.mark.parametrize(
    ("first_s", "expected_s"),
    [
        pytest.param(-1.0, 0.1, id="on time"),
        pytest.param(-0.85, 0.25, id="fast"),
        pytest.param(-0.5, 0.4, id="so fast that four targets are the limit"),
        pytest.param(-1.03, 0.07, id="a little late"),
        pytest.param(-1.06, 0.05, id="late: twice as fast as the target"),
        pytest.param(-9.0, 0.05, id="very late: no faster than that"),
    ],
)
def test_a_stream_that_was_fast_may_be_slow_and_a_late_stream_catches_up(
    first_s: float, expected_s: float
) -> None:
    """Its eleventh token came just now, ten gaps after the first."""
    assert budget_s(stream(11, first_s)) == pytest.approx(expected_s)


def test_time_since_the_last_token_is_used_up() -> None:
    assert budget_s(stream(11, -0.5, last_s=-0.1)) == pytest.approx(0.3)
    assert budget_s(stream(11, -0.85, last_s=-0.1)) == pytest.approx(0.25)
    assert budget_s(stream(11, -9.0, last_s=-0.02)) == pytest.approx(0.03)


def test_the_stream_with_the_least_time_counts() -> None:
    assert budget_s(stream(11, -0.5), stream(11, -0.9), stream(2, -0.04)) == pytest.approx(0.16)


def test_a_token_in_flight_counts() -> None:
    """It comes out when the step begins."""
    third = stream(3, -0.15)._replace(last_token_s=None)
    assert budget_s(third) == pytest.approx(0.15)
    first = stream(1, 0.0)._replace(last_token_s=None, first_token_s=None)
    assert budget_s(first) == pytest.approx(TPOT_S)


def test_an_own_tpot_target_is_a_mean_too_and_replaces_all_limits_on_gaps() -> None:
    slos = (*TPOT, "tbt p99 <= 60ms")
    assert budget_s(stream(11, -0.5), slos=slos) == pytest.approx(0.06)
    assert budget_s(stream(11, -0.5, tpot_s=0.08), slos=slos) == pytest.approx(0.32)
    assert budget_s(stream(11, -0.5, tpot_s=0.06), slos=slos) == pytest.approx(0.16)
    assert budget_s(stream(11, -0.5, tpot_s=0.04), slos=slos) == pytest.approx(0.02)


def test_a_gap_target_holds_for_each_gap_whatever_a_stream_has_saved() -> None:
    slos = ("tbt p99 <= 100ms",)
    assert budget_s(stream(11, -0.5), slos=slos) == pytest.approx(0.1)
    assert budget_s(stream(11, -0.5, last_s=-0.04), slos=slos) == pytest.approx(0.06)
    assert budget_s(stream(11, -9.0), slos=slos) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "policy", [name for name in LATENCY_POLICIES if not POLICIES[name].averages_tpot]
)
@pytest.mark.parametrize("tpot_s", [None, 0.04])
def test_a_tpot_target_limits_each_gap_under_a_policy_that_does_not_average(
    policy: str, tpot_s: float | None
) -> None:
    slos = ("tpot p99 <= 40ms",) if tpot_s is None else TPOT
    for first_s in (-0.2, -0.4, -0.6):
        plan = plan_beside(stream(11, first_s, tpot_s=tpot_s), slos=slos, policy=policy)
        assert 0.038 < plan.predicted_s <= 0.04


def test_no_policy_of_the_papers_averages_and_the_default_does() -> None:
    averaging = {name for name, policy in POLICIES.items() if policy.averages_tpot}
    assert not averaging & PAPERS
    assert "coserve" in averaging


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=40),
    st.floats(0, 2),
)
def test_a_stream_keeps_its_mean_and_regains_it_after_it_was_late(
    shares: list[float], late_s: float
) -> None:
    """Each step takes a share of its longest time; the second token comes ``late_s`` too late."""
    brain = scheduler("coserve", slos=TPOT)
    times_s = [0.0, TPOT_S + late_s]
    for share in shares:
        seen = snapshot(stream(len(times_s), 0.0, times_s[-1]), now_s=times_s[-1])
        longest_s = brain.plan(seen, NO_CACHE).budget_s
        assert TPOT_S / 2 <= longest_s <= 4.0001 * TPOT_S
        times_s.append(times_s[-1] + share * longest_s)
    lateness_s = [at_s - TPOT_S * number for number, at_s in enumerate(times_s)][1:]
    for before_s, after_s in itertools.pairwise(lateness_s):
        assert after_s <= max(before_s - TPOT_S / 2, 0.0) + 1e-6


# --- The pace where there is no target ---------------------------------------------------------


def decodes(count: int, last_s: float = 0.0) -> list[Request]:
    return [online(100, DECODING, last_token_s=last_s) for _ in range(count)]


def paced_plan(
    *requests: Request,
    slowdown: float | None = 1.0,
    median_ttft_s: float = 1.0,
    p99_ttft_s: float | None = None,
    stall_s: float = 0.2,
    slos: Sequence[str] = ("ttft p99 <= 20s",),
) -> StepPlan:
    """The plan beside more offline work than fits, with what prompts and gaps take alone."""
    brain = scheduler(
        "coserve", queued(9000), targets=SloTargets(), slos=slos, stream_slowdown=slowdown
    )
    allowance = brain.interference.allowance
    allowance.gaps({(None, stall_s): 400}, 0.0)
    p99_ttft_s = p99_ttft_s or median_ttft_s
    for ttft_s in [median_ttft_s] * 390 + [p99_ttft_s] * 10:
        allowance.first_token(online().info, ttft_s, 0.0)
    return brain.plan(snapshot(*requests), NO_CACHE)


@pytest.mark.parametrize("slowdown", [0.5, 1.0, 3.0])
def test_without_a_target_for_gaps_a_step_takes_so_many_times_its_decodes(slowdown: float) -> None:
    streams = decodes(10)
    alone_s = MODEL.predict(StepStats.of(decodes=[one.computed_tokens for one in streams]))
    plan = paced_plan(*streams, slowdown=slowdown)
    assert plan.bound_by is Bound.GAP
    assert plan.budget_s == pytest.approx((1 + slowdown) * alone_s)
    assert 0.95 * plan.budget_s < plan.predicted_s <= plan.budget_s


def test_the_pace_counts_from_the_last_token() -> None:
    late_s = 0.004
    on_time, late = (paced_plan(*decodes(10, last_s)) for last_s in (0.0, -late_s))
    assert late.budget_s == pytest.approx(on_time.budget_s - late_s)


@pytest.mark.parametrize("slos", [TPOT, ("tbt p99 <= 100ms",)])
def test_a_target_for_tpot_or_gaps_replaces_the_pace(slos: Sequence[str]) -> None:
    assert paced_plan(*decodes(10), slos=slos, stall_s=0.01).budget_s == pytest.approx(0.1)


def test_no_pace_holds_without_online_decodes_or_without_a_slowdown() -> None:
    assert paced_plan(slos=()).bound_by is Bound.NONE
    assert paced_plan(*decodes(10), slowdown=None, slos=()).bound_by is Bound.NONE


# --- Prompts beside streams --------------------------------------------------------------------


def prompts_plan(*requests: Request, allowed_s: float, stall_s: float = 0.2) -> StepPlan:
    """The plan where offline work may add ``allowed_s`` to first tokens."""
    return paced_plan(
        *requests, median_ttft_s=10 * allowed_s, stall_s=stall_s, slos=("ttft p99 <= +10%",)
    )


PACE_S = 2 * 0.011
"""Ten decodes take 11 ms, and a prompt of 1,000 tokens 110 ms, or 200 ms in parts of 11 ms."""


def test_prompts_keep_the_pace_where_that_delays_first_tokens_little() -> None:
    plan = prompts_plan(*decodes(10), online(1000), allowed_s=0.1)
    assert plan.batch.decode_requests == 10
    assert plan.predicted_s == pytest.approx(PACE_S, rel=0.05)


def end_of_prompt_s(plan: StepPlan, prompt_tokens: int = 1000) -> float:
    """When a prompt has ended that is computed in pieces as long as the plan's first."""
    return plan.predicted_s * prompt_tokens / plan.prefills[0].tokens


def test_prompts_are_cut_as_short_as_first_tokens_allow() -> None:
    requests, alone_s = (*decodes(10), online(1000)), 0.11
    plan = prompts_plan(*requests, allowed_s=0.05)
    assert plan.batch.decode_requests == 10
    assert plan.predicted_s > 1.2 * PACE_S
    assert end_of_prompt_s(plan) == pytest.approx(alone_s + 0.05, rel=0.02)


def long_prompt_plan(*, stall_s: float = 0.2) -> StepPlan:
    """The plan with a prompt that takes three times the median alone, and a third of the P99."""
    slos = ("ttft p99 <= +10%",)
    requests = (*decodes(10), online(3000))
    return paced_plan(*requests, median_ttft_s=0.1, p99_ttft_s=1.0, stall_s=stall_s, slos=slos)


def test_a_long_prompt_may_end_later_by_a_share_of_its_time() -> None:
    alone_s = MODEL.predict(StepStats().with_prefill(3000, 0))
    assert end_of_prompt_s(long_prompt_plan(), 3000) == pytest.approx(1.15 * alone_s, rel=0.02)


def test_prompts_are_cut_no_shorter_than_their_own_targets_allow() -> None:
    requests = (*decodes(10), online(1000, ttft_s=0.13))
    assert end_of_prompt_s(prompts_plan(*requests, allowed_s=0.1)) <= 0.13


def test_prompts_stall_streams_no_longer_than_alone() -> None:
    """A step of prompts may take as long as the P99 gap alone."""
    plan = long_prompt_plan(stall_s=0.05)
    assert plan.batch.decode_requests == 10
    assert plan.predicted_s == pytest.approx(0.05, rel=0.05)


def test_more_prompts_that_wait_are_delayed_more() -> None:
    requests = (*decodes(10), online(1000))
    more = [online(1000) for _ in range(3)]
    assert prompts_plan(*requests, allowed_s=0.15).predicted_s == pytest.approx(PACE_S, rel=0.05)
    assert prompts_plan(*requests, *more, allowed_s=0.15).predicted_s > 1.2 * PACE_S


def test_a_pace_that_holds_no_prompt_token_is_exceeded() -> None:
    plan = prompts_plan(*decodes(10, last_s=-0.1), online(1000), allowed_s=0.1)
    assert plan.batch.decode_requests == 10
    assert plan.prefills[0].tokens >= 100


def test_prompts_never_exceed_a_pace_that_is_longer_than_the_stall_alone() -> None:
    plan = prompts_plan(*decodes(10), online(1000), allowed_s=0.05, stall_s=0.02)
    assert plan.predicted_s <= PACE_S * 1.01


def test_offline_work_has_no_part_in_a_stall() -> None:
    requests = (*decodes(10), online(300))
    plan = prompts_plan(*requests, allowed_s=0.005, stall_s=0.06)
    assert [chunk.rid for chunk in plan.prefills] == [requests[-1].info.rid]
    assert plan.predicted_s > PACE_S


@pytest.mark.parametrize("slos", [TPOT, ("tbt p99 <= 50ms",)])
def test_under_a_target_for_gaps_prompts_stall_nobody_longer(slos: Sequence[str]) -> None:
    plan = paced_plan(*decodes(10), online(5000), median_ttft_s=0.01, slos=slos, stall_s=0.04)
    assert plan.batch.decode_requests == 10
    assert plan.predicted_s <= (0.1 if slos is TPOT else 0.05)
