"""Which lane runs next: scenarios with a step that is suspended, or could be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from core.scheduler.policy_exceptions import LATENCY_POLICIES
from core.scheduler.scenarios import (
    MODEL,
    NO_CACHE,
    TARGETS,
    offline,
    online,
    queued,
    scheduler,
    snapshot,
)
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.planning.lanes import is_late_behind
from sglang_coserve.core.policies import POLICIES
from sglang_coserve.core.request import RequestClass, RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.snapshot import EngineSnapshot, Request, RequestInfo, SuspendedStep
from sglang_coserve.core.step import Lane, StepPlan, StepResult
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.metrics import SloTargets

DECODING, PAUSED = RequestState.DECODING, RequestState.PAUSED
WORK = StepStats.of([(1000, 0)])
"""110 ms of it."""


def seen(*requests: Request, done_share: float | None = None, **engine: float) -> EngineSnapshot:
    """An engine whose steps have four safepoints."""
    suspended = None if done_share is None else SuspendedStep(7, WORK, done_share, since_s=0.0)
    settings = {"stop_share": 0.25, "resume_s": 0.001, **engine}
    return snapshot(*requests, suspended=suspended, **settings)


def plan_of(core: Scheduler, engine: EngineSnapshot) -> StepPlan:
    return core.plan(engine, NO_CACHE)


def test_without_online_requests_offline_work_has_a_lane_of_its_own_for_any_time() -> None:
    plan = plan_of(scheduler("coserve", queued(500)), seen())
    assert plan.lane is Lane.OFFLINE
    assert plan.until_s == math.inf
    assert plan.prefills


@pytest.mark.parametrize("policy", LATENCY_POLICIES)
def test_a_part_of_a_step_of_the_lane_fits_between_two_decodes(policy: str) -> None:
    plan = plan_of(scheduler(policy, queued(8000)), seen())
    assert 0.25 * plan.predicted_s <= TARGETS.tpot_s


def test_offline_requests_of_a_suspended_step_count_for_the_most_that_may_run() -> None:
    core = scheduler("coserve", *(queued(50) for _ in range(3)), max_offline_requests=2)
    one_more = plan_of(core, seen(online(50), done_share=0.5))
    assert len(one_more.prefills) == 2  # The suspended step has one request.


def test_offline_decodes_join_their_lane_when_no_online_request_is_left() -> None:
    rider, fixed = offline(100, DECODING), offline(100, DECODING, can_pause=False)
    plan = plan_of(scheduler("coserve"), seen(rider, fixed))
    assert {*plan.pause} == {rider.info.rid, fixed.info.rid}
    assert plan.batch.decode_requests == 2


@pytest.mark.parametrize("policy", LATENCY_POLICIES)
@pytest.mark.parametrize("state", [RequestState.WAITING, RequestState.PREFILLING])
def test_an_online_prompt_goes_before_a_suspended_step(policy: str, state: RequestState) -> None:
    prompt = online(100, state, computed=0 if state is RequestState.WAITING else 10)
    plan = plan_of(scheduler(policy), seen(prompt, done_share=0.5))
    assert plan.lane is Lane.SHARED
    assert [chunk.rid for chunk in plan.prefills] == [prompt.info.rid]


@pytest.mark.parametrize("policy", LATENCY_POLICIES)
def test_a_suspended_step_goes_on_until_a_decode_is_due(policy: str) -> None:
    # Its token is due at 100 ms, and the step that computes it takes 10 ms.
    plan = plan_of(scheduler(policy), seen(online(100, DECODING), done_share=0.5))
    assert (plan.resumes, plan.step, plan.batch) == (True, 7, WORK)
    assert plan.until_s == pytest.approx(0.09, abs=0.001)
    assert plan.predicted_s == pytest.approx(0.5 * MODEL.predict(WORK))


@pytest.mark.parametrize("policy", LATENCY_POLICIES)
def test_when_it_is_due_a_decode_runs_and_nothing_beside_it(policy: str) -> None:
    request, paused = online(100, DECODING), offline(100, PAUSED)
    core = scheduler(policy, queued(500))
    plan = plan_of(core, replace(seen(request, paused, done_share=0.5), now_s=0.085))
    assert plan.lane is Lane.SHARED
    assert plan.batch.decode_requests == 1
    assert not plan.prefills
    assert not plan.resume


def test_a_part_that_reaches_no_safepoint_in_time_is_not_begun() -> None:
    # A quarter of the step takes 27 ms, but of the last one a tenth is left.
    request = online(100, DECODING)
    for done_share, resumes in ((0.5, False), (0.9, True)):
        engine = replace(seen(request, done_share=done_share), now_s=0.07)
        assert plan_of(scheduler("coserve"), engine).resumes is resumes


def test_a_decode_without_a_deadline_waits_for_the_suspended_step_and_for_no_other() -> None:
    targets = SloTargets(ttft_s=1.0, tpot_s=None)
    core = scheduler("coserve", queued(500), targets=targets)
    plan = plan_of(core, seen(online(100, DECODING), done_share=0.5))
    assert (plan.resumes, plan.until_s) == (True, math.inf)
    plan = plan_of(core, seen(online(100, DECODING)))
    assert (plan.lane, plan.batch.decode_requests) == (Lane.SHARED, 1)
    assert plan.prefills


def test_a_suspended_step_is_dropped_only_if_all_else_is_not_enough() -> None:
    core = scheduler("coserve")
    prompt, paused = online(300), offline(200, PAUSED)
    engine = seen(prompt, paused, done_share=0.5, free_kv_tokens=150)
    assert not plan_of(core, engine).drops
    assert [retraction.rid for retraction in plan_of(core, engine).retract] == [paused.info.rid]
    engine = seen(prompt, paused, done_share=0.5, free_kv_tokens=50)
    plan = plan_of(core, engine)
    assert plan.drops
    assert plan.is_idle
    assert not plan.retract


@pytest.mark.parametrize("policy", LATENCY_POLICIES)
@pytest.mark.parametrize("own_s", [None, 0.02])
def test_a_step_that_waits_in_vain_is_dropped(policy: str, own_s: float | None) -> None:
    """Streams that never pause would keep it for minutes, with its requests.

    Its parts take 55 ms: too long for streams that decode every 60 ms, and for one that asks for
    20 ms.
    """
    core = scheduler(policy, targets=SloTargets(1.0, 0.1 if own_s else 0.06))

    def plan_at(now_s: float, *more: Request) -> StepPlan:
        stream = online(100, DECODING, last_token_s=now_s, first_token_s=now_s - 0.5, tpot_s=own_s)
        return plan_of(
            core, replace(seen(stream, *more, done_share=0.5), now_s=now_s, stop_share=0.5)
        )

    early, late = plan_at(0.9), plan_at(1.1)
    assert (early.drops, early.batch.decode_requests) == (False, 1)
    assert (late.drops, late.is_idle) == (True, True)
    assert not plan_at(1.1, online(100, arrival_s=1.1)).drops


def test_a_step_that_can_be_resumed_is_not_dropped_however_long_it_has_waited() -> None:
    plan = plan_of(scheduler("coserve"), replace(seen(done_share=0.5), now_s=100.0))
    assert (plan.resumes, plan.drops) == (True, False)


def test_offline_work_joins_streams_that_leave_a_part_no_time_of_their_own() -> None:
    """Own targets too strict for a part of the step: offline work runs beside the decodes."""
    stream = online(100, DECODING, tpot_s=0.05)
    paused = offline(100, PAUSED)
    plan = plan_of(scheduler("coserve"), seen(stream, paused, done_share=0.5, stop_share=0.5))
    assert plan.resume == (paused.info.rid,)


def test_nothing_of_the_lane_begins_while_an_online_request_waits_for_memory() -> None:
    """So a step that was dropped for it is not begun, and dropped, again and again."""
    core = scheduler("coserve", queued(50))
    for state in (DECODING, RequestState.PREFILLING):
        holding = online(100, state, computed=50)
        engine = seen(online(300), holding, free_kv_tokens=80)
        plan = plan_of(core, engine)
        assert plan.lane is Lane.SHARED
        assert {chunk.rid for chunk in plan.prefills} <= {holding.info.rid}


# --- Beside decodes -----------------------------------------------------------------------


@pytest.mark.parametrize("ttft_s", [0.03, None])
def test_offline_work_runs_beside_decodes(ttft_s: float | None) -> None:
    """A step between them would pay for its own fixed cost, and for resumptions."""
    core = scheduler("coserve", queued(4000), targets=SloTargets(ttft_s, 0.1))
    plan = plan_of(core, seen(online(100, DECODING), stop_share=0.02))
    assert plan.lane is Lane.SHARED
    assert plan.prefills


def test_a_step_of_its_own_stops_soon_enough_for_an_arrival_and_fits_between_decodes() -> None:
    model = PolynomialModel.of(compute_token_s=1e-4, iteration_s=0.010)
    for ttft_s, longest_s in ((0.04, 0.08), (None, 4 * 0.049)):
        core = scheduler("coserve", queued(8000), model=model, targets=SloTargets(ttft_s, 0.06))
        plan = plan_of(core, seen())
        assert plan.predicted_s == pytest.approx(longest_s, rel=0.01)


def test_decodes_that_run_to_their_end_are_as_short_as_what_an_arrival_may_wait() -> None:
    """On a GPU they are one graph, but a step with prefills stops."""
    requests = [offline(2000, PAUSED) for _ in range(40)]
    model = PolynomialModel.of(context_token_s=1e-6, iteration_s=0.001)
    core = scheduler("coserve", model=model, targets=SloTargets(0.08, 0.1))
    stops = plan_of(core, seen(*requests))
    assert stops.batch.decode_requests == 40
    ends = plan_of(core, seen(*requests, decodes_stop=False))
    assert ends.lane is Lane.OFFLINE
    assert 0 < ends.batch.decode_requests < 40
    assert ends.predicted_s <= 0.04
    prompt = scheduler("coserve", queued(8000), targets=SloTargets(0.04, 0.1))
    assert plan_of(prompt, seen(decodes_stop=False)).predicted_s == pytest.approx(0.08, rel=0.01)


def test_decodes_that_run_to_their_end_are_not_begun_before_a_decode_that_is_due() -> None:
    work = StepStats(decode_requests=8, decode_context_tokens=8000)
    suspended = SuspendedStep(7, work, 0.0, since_s=0.0)
    engine = replace(seen(online(100, DECODING)), now_s=0.08, suspended=suspended)
    model = PolynomialModel.of(context_token_s=3e-6)
    core = scheduler("coserve", model=model)
    assert plan_of(core, engine).resumes
    assert not plan_of(core, replace(engine, decodes_stop=False)).resumes


def test_paused_decodes_join_a_step_beside_online_work_unless_a_prompt_is_late() -> None:
    paused = offline(100, PAUSED)
    core = scheduler("coserve")
    assert plan_of(core, seen(online(100, DECODING), paused)).resume == (paused.info.rid,)
    late = online(50, arrival_s=-3.0)
    assert not plan_of(core, seen(online(100, DECODING), late, paused)).resume


def test_one_that_cannot_pause_stays_in_the_lane_where_it_is() -> None:
    fixed = offline(100, PAUSED, can_pause=False)
    plan = plan_of(scheduler("conserve"), seen(online(100, DECODING), fixed))
    assert not plan.resume
    assert not plan.retract


# --- Whether arrivals wait ----------------------------------------------------------------


def arrived(prompt_tokens: int, arrival_s: float, own_s: float | None = None) -> RequestInfo:
    return RequestInfo("on", RequestClass.ONLINE, prompt_tokens, 8, arrival_s, ttft_target_s=own_s)


ONE_S = MODEL.predict(StepStats.of([(100, 0)]))
BOTH_S = MODEL.predict(StepStats.of([(100, 0), (400, 0)]))


@pytest.mark.parametrize(
    ("waiting", "now_s", "in_time_s"),
    [
        pytest.param([(100, 1.0)], 1.9, 1.0 + ONE_S, id="its prompt is computed after the step"),
        pytest.param([(100, 1.0), (400, 1.5)], 1.9, 1.0 + BOTH_S, id="all are computed together"),
        pytest.param([(100, 1.0)], 2.5, 1.5 + ONE_S, id="a step that should have ended ends now"),
        pytest.param([(100, 1.0, 0.5)], 1.9, math.inf, id="its own target counts"),
        pytest.param([(100, 1.0, 10.0)], 1.9, 0.0, id="its own target may be looser"),
    ],
)
def test_an_arrival_waits_for_the_end_of_a_step_unless_any_is_late_then(
    waiting: list[tuple[int, float]], now_s: float, in_time_s: float
) -> None:
    """The step ends at 2 s."""
    infos = [arrived(*each) for each in waiting]
    assert is_late_behind(2.0, infos, now_s, MODEL, max(in_time_s - 0.001, 0.001)) == (
        in_time_s > 0
    )
    assert is_late_behind(2.0, infos, now_s, MODEL, in_time_s + 0.001) == math.isinf(in_time_s)


def test_without_any_target_an_arrival_does_not_wait() -> None:
    assert is_late_behind(2.0, [arrived(100, 1.0)], 1.9, MODEL, None)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_arrival_waits_only_under_a_policy_that_lets_it(policy: str) -> None:
    waits = not scheduler(policy).must_suspend(0.0, [arrived(1, 0.0, 60.0)], 0.0)
    assert waits == POLICIES[policy].lets_arrivals_wait


def test_conserve_lets_arrivals_wait_and_the_default_does_not() -> None:
    assert POLICIES["conserve"].lets_arrivals_wait
    assert not POLICIES["coserve"].lets_arrivals_wait


# --- Where there is no lane ---------------------------------------------------------------


@pytest.mark.parametrize("policy", [name for name in POLICIES if not POLICIES[name].is_preemptive])
def test_systems_without_preemption_have_none(policy: str) -> None:
    core = scheduler(policy, queued(500), targets=TARGETS)
    assert plan_of(core, seen()).lane is Lane.SHARED


def test_what_a_suspension_costs_is_learned_from_the_steps_that_had_one() -> None:
    core = scheduler("coserve", refine=True)
    engine = seen(online(100, DECODING), done_share=0.5)
    assert plan_of(core, engine).resumes
    predicted_s = core.model.predict(WORK)
    core.update(StepResult(None, 0.0, predicted_s + 2 * 0.08, batch=WORK, suspensions=2))
    assert not plan_of(core, engine).resumes
    # It is no property of the batch.
    assert core.model.predict(WORK) == predicted_s
    core.update(StepResult(None, 0.0, predicted_s - 0.2, batch=WORK, suspensions=1))
    assert plan_of(core, engine).resumes
