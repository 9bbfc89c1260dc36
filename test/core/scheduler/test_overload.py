"""Shedding: who is refused, and how much room is left so that those who are served are in time."""

from __future__ import annotations

import pytest

from core.scheduler.policy_exceptions import SHEDS_NOBODY, all_but
from core.scheduler.scenarios import NO_CACHE, online, rids, scheduler, snapshot
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import Overload
from sglang_coserve.core.step import StepPlan
from sglang_coserve.metrics import SloTargets

DECODING = RequestState.DECODING
SHEDDING = all_but(SHEDS_NOBODY)
TTFT = SloTargets(ttft_s=1.0)


def shedding(policy: str = "coserve", targets: SloTargets = TTFT) -> Scheduler:
    return scheduler(policy, targets=targets, overload=Overload.SHED)


def plan_with_slack(brain: Scheduler, slack_s: float) -> StepPlan:
    """A prompt that takes 30 ms."""
    prompt = online(200, rid="prompt", arrival_s=slack_s - 1.0)
    return brain.plan(snapshot(prompt), NO_CACHE)


@pytest.mark.parametrize("policy", SHEDDING)
def test_what_can_no_longer_make_it_is_refused_and_nothing_else(policy: str) -> None:
    brain = shedding(policy)
    assert plan_with_slack(brain, 0.032).shed == ()
    refused = plan_with_slack(brain, 0.028)
    assert refused.shed == ("prompt",)
    assert refused.is_idle


@pytest.mark.parametrize("policy", SHEDDING)
def test_who_has_begun_is_not_refused(policy: str) -> None:
    begun = online(200, RequestState.PREFILLING, computed=100, arrival_s=-3.0)
    again = online(200, generated=5, arrival_s=-3.0, last_token_s=-2.0)
    plan = shedding(policy).plan(snapshot(begun, again), NO_CACHE)
    assert plan.shed == ()
    assert {chunk.rid for chunk in plan.prefills} >= {*rids([begun])}


def test_prompts_leave_the_decodes_in_time() -> None:
    """Not even for a first token that would be late otherwise a decode waits."""
    targets = SloTargets(ttft_s=1.0, tpot_s=0.1)
    decodes = [online(10, DECODING) for _ in range(100)]
    prompt = online(100, arrival_s=0.025 - 1.0)
    plan = shedding(targets=targets).plan(snapshot(*decodes, prompt), NO_CACHE)
    assert plan.shed == (*rids([prompt]),)
    assert plan.batch.decode_requests == 100
    assert not plan.skips_decodes


@pytest.mark.parametrize(("slack_s", "is_refused"), [(0.35, True), (0.37, False)])
def test_a_prompt_that_needs_several_steps_beside_decodes_takes_their_time_too(
    slack_s: float, is_refused: bool
) -> None:
    """In one step it would take 319 ms; the decodes in three further ones 11 ms each."""
    targets = SloTargets(ttft_s=1.0, tpot_s=0.1)
    decodes = [online(10, DECODING) for _ in range(10)]
    prompt = online(3000, rid="prompt", arrival_s=slack_s - 1.0)
    plan = shedding(targets=targets).plan(snapshot(*decodes, prompt), NO_CACHE)
    assert plan.shed == (("prompt",) if is_refused else ())
