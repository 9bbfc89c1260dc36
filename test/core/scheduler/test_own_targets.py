"""Targets that requests bring along change plans under every policy that looks at targets."""

from __future__ import annotations

import pytest

from core.scheduler.policy_exceptions import (
    HAS_FIXED_BUDGET,
    LATENCY_POLICIES,
    SERVES_BY_URGENCY,
    all_but,
)
from core.scheduler.scenarios import NO_CACHE, offline, online, queued, scheduler, snapshot
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.step import StepPlan
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator.run import BASELINES

DECODING = RequestState.DECODING
LOOSE = SloTargets(ttft_s=10.0, tpot_s=1.0)


def decode_plan(policy: str, tpot_s: float | None) -> StepPlan:
    """An online decode whose last token is new, and an offline prompt that could take 1 s."""
    request = online(10, DECODING, tpot_s=tpot_s)
    brain = scheduler(policy, queued(9000), targets=LOOSE)
    return brain.plan(snapshot(request, offline(10)), NO_CACHE)


@pytest.mark.parametrize("policy", LATENCY_POLICIES)
def test_an_own_tpot_target_bounds_the_steps_of_its_decodes(policy: str) -> None:
    assert decode_plan(policy, None).predicted_s > 0.06
    assert decode_plan(policy, 0.06).predicted_s <= 0.06


@pytest.mark.parametrize("policy", all_but(BASELINES | HAS_FIXED_BUDGET))
def test_an_own_tpot_target_may_be_looser(policy: str) -> None:
    def predicted_s(tpot_s: float | None) -> float:
        request = online(10, DECODING, tpot_s=tpot_s)
        brain = scheduler(policy, queued(9000), targets=SloTargets(tpot_s=0.06))
        return brain.plan(snapshot(request, offline(10)), NO_CACHE).predicted_s

    assert predicted_s(None) <= 0.06
    assert predicted_s(0.5) > 0.06


@pytest.mark.parametrize("policy", LATENCY_POLICIES)
def test_an_own_ttft_target_bounds_the_step_that_computes_it(policy: str) -> None:
    """The prompt takes 20 ms; offline work may fill what is left until its first token is due."""

    def predicted_s(ttft_s: float | None) -> float:
        request = online(100, ttft_s=ttft_s)
        brain = scheduler(policy, queued(9000), targets=LOOSE)
        plan = brain.plan(snapshot(request, offline(10)), NO_CACHE)
        assert plan.prefills[0].rid == request.info.rid
        return plan.predicted_s

    assert predicted_s(None) > 0.05
    assert 0.02 <= predicted_s(0.05) <= 0.05


@pytest.mark.parametrize("policy", LATENCY_POLICIES)
def test_offline_work_leaves_a_late_own_target_alone(policy: str) -> None:
    request = online(100, ttft_s=0.05, arrival_s=-0.1)
    plan = scheduler(policy, queued(9000), targets=LOOSE).plan(snapshot(request), NO_CACHE)
    served = [chunk.rid for chunk in plan.prefills]
    assert served[0] == request.info.rid
    assert (served == [request.info.rid]) == (policy not in SERVES_BY_URGENCY)


@pytest.mark.parametrize("policy", LATENCY_POLICIES)
def test_an_own_tpot_target_that_no_engine_keeps_stops_nobody(policy: str) -> None:
    # A step of the decode alone takes 10 ms.
    plan = decode_plan(policy, 0.001)
    assert plan.predicted_s == decode_plan(policy, None).predicted_s
    assert plan.batch.prefill_tokens


@pytest.mark.parametrize("policy", LATENCY_POLICIES)
def test_an_own_ttft_target_that_no_engine_keeps_stops_nobody(policy: str) -> None:
    # The prompt alone takes 20 ms.
    requests = [online(100, ttft_s=ttft_s) for ttft_s in (None, 0.005)]
    cores = [scheduler(policy, queued(9000), targets=LOOSE) for _ in requests]
    plans = [
        core.plan(snapshot(request, offline(10)), NO_CACHE)
        for core, request in zip(cores, requests, strict=True)
    ]
    assert plans[0].predicted_s == plans[1].predicted_s
