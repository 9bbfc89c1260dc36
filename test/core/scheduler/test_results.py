"""What ran counts, and nothing that was only planned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.scheduler.scenarios import (
    MODEL,
    NO_CACHE,
    TARGETS,
    offline,
    online,
    queued,
    ran,
    result_of,
    scheduler,
    snapshot,
)
from sglang_coserve.core.policies.bros import BrosPolicy
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.step import ServedRequest, StepResult
from sglang_coserve.core.step_stats import StepStats

DECODING = RequestState.DECODING


# --- A step runs once ---------------------------------------------------------------------


def test_a_plan_is_started_once_and_has_one_result() -> None:
    brain, seen = scheduler("coserve", queued(100)), snapshot(online(50))
    plan = brain.plan(seen, NO_CACHE)
    result = ran(brain, plan, seen)
    with pytest.raises(AssertionError, match="step 0 is not 1, the next"):
        brain.start(plan, plan.prefills)
    with pytest.raises(AssertionError, match="step 0 is not in flight"):
        brain.update(result)


def test_only_what_was_planned_can_be_admitted() -> None:
    brain = scheduler("coserve", queued(50, rid="a"))
    plan = brain.plan(snapshot(), NO_CACHE)
    (chunk,) = plan.prefills
    with pytest.raises(AssertionError, match="other prefills"):
        brain.start(plan, [chunk._replace(rid="b")])
    # As long as it is, where the cache had less of the prompt than when it was planned.
    brain.start(plan, [chunk._replace(tokens=chunk.tokens + 1)])
    assert len(brain.queue) == 0


def test_what_a_step_in_flight_took_from_the_queue_is_not_planned_again() -> None:
    """As under overlap scheduling, where the next plan comes before the last one's result."""
    brain = scheduler("coserve", queued(100, rid="a"), queued(100, rid="b", first=500), max_picks=1)
    seen = snapshot()
    first = brain.plan(seen, NO_CACHE)
    brain.start(first, first.prefills)
    second = brain.plan(seen, NO_CACHE)
    brain.start(second, second.prefills)
    assert [chunk.rid for plan in (first, second) for chunk in plan.prefills] == ["a", "b"]
    brain.update(result_of(first, seen, chunks=first.prefills))
    brain.update(result_of(second, seen, chunks=second.prefills))


# --- A part of a plan ---------------------------------------------------------------------


def test_what_was_not_admitted_goes_on_waiting_and_is_planned_again() -> None:
    brain = scheduler("coserve", *(queued(100, rid=f"q{i}", first=1000 * i) for i in range(3)))
    seen = snapshot()
    plan = brain.plan(seen, NO_CACHE)
    assert len(plan.prefills) == 3
    ran(brain, plan, seen, admitted=plan.prefills[:1])
    assert brain.queue.is_running("q0")
    assert [chunk.rid for chunk in brain.plan(seen, NO_CACHE).prefills] == ["q1", "q2"]


def test_the_time_of_a_part_teaches_the_model_of_that_part() -> None:
    brain = scheduler("coserve", *(queued(300, rid=f"q{i}", first=1000 * i) for i in range(3)))
    seen = snapshot()
    plan = brain.plan(seen, NO_CACHE)
    part_s = MODEL.predict(StepStats.of([(300, 0)]))
    ran(brain, plan, seen, admitted=plan.prefills[:1], seconds=part_s)
    assert brain.prediction_error.mape == 0.0


# --- A step of which nothing came ---------------------------------------------------------


def test_a_step_that_was_dropped_teaches_nothing() -> None:
    brain = scheduler("coserve", queued(500, rid="q"))
    seen = snapshot()
    plan = brain.plan(seen, NO_CACHE)
    brain.start(plan, plan.prefills)
    brain.update(StepResult(plan.step, seen.now_s, 9.0, dropped=("q",)))
    assert brain.prediction_error.mape is None
    brain.restore("q", 0)
    assert [chunk.rid for chunk in brain.plan(seen, NO_CACHE).prefills] == ["q"]


def test_a_step_that_did_not_run_teaches_nothing() -> None:
    policy = BrosPolicy(base_batch_requests=4)
    brain, seen = scheduler(policy), snapshot(online(10, DECODING))
    plan = brain.plan(seen, NO_CACHE)
    brain.start(plan, ())
    brain.update(StepResult(plan.step, seen.now_s, 3.0))
    assert brain.prediction_error.mape is None
    assert policy == BrosPolicy(base_batch_requests=4)


# --- When tokens came ---------------------------------------------------------------------


def attainment(brain: Scheduler, *rids: str) -> float | None:
    """End these requests; return which share of all that ended met their targets."""
    for rid in rids:
        brain.finish(rid)
    brain.interference.advance(MODEL.predict, 1000.0)
    return brain.interference.monitor.report(60.0).attainment


@pytest.mark.parametrize("late_s", [-0.01, 0.01])
def test_a_first_token_is_judged_by_when_it_came(late_s: float) -> None:
    brain = scheduler("coserve")
    prompt = online(100, arrival_s=50.0)
    brain.arrived(prompt.info)
    seen = snapshot(prompt, now_s=50.0)
    plan = brain.plan(seen, NO_CACHE)
    brain.start(plan, plan.prefills)
    result = result_of(plan, seen, chunks=plan.prefills, seconds=plan.predicted_s)
    at_s = 50.0 + TARGETS.ttft_s + late_s
    brain.update(replace(result, served=(ServedRequest(prompt.info, at_s),)))
    assert attainment(brain, prompt.info.rid) == (late_s < 0)


def test_what_a_step_without_a_plan_served_is_judged_as_well() -> None:
    brain = scheduler("coserve")
    prompt = online(100, arrival_s=1.0)
    brain.arrived(prompt.info)
    brain.update(StepResult(None, 1.0, served=(ServedRequest(prompt.info, 3.0),)))
    assert attainment(brain, prompt.info.rid) == 0.0


def test_steps_with_equal_batches_are_not_taken_for_each_other() -> None:
    """The first is dropped, so it has no first token; the second, which began when the first
    was late already, is in time for the request that it serves."""
    brain = scheduler("coserve")
    plans = []
    for now_s in (0.0, 5.0):
        brain.add_offline(queued(500, rid=f"q{now_s}", first=int(1000 * now_s)))
        prompt = online(100, rid=f"p{now_s}", arrival_s=now_s - 0.1)
        brain.arrived(prompt.info)
        seen = snapshot(prompt, now_s=now_s)
        plan = brain.plan(seen, NO_CACHE)
        brain.start(plan, plan.prefills)
        plans.append((plan, seen))
    (first, first_seen), (second, second_seen) = plans
    assert first.batch == second.batch
    everyone = tuple(chunk.rid for chunk in first.prefills)
    brain.update(StepResult(first.step, first_seen.now_s, dropped=everyone))
    brain.update(result_of(second, second_seen, chunks=second.prefills, seconds=0.2))
    assert attainment(brain, "p5.0") == 1.0


def test_a_gap_is_judged_by_when_its_token_came() -> None:
    brain = scheduler("coserve", slos=("tbt p99 <= 100ms",))
    request = online(10, DECODING, last_token_s=50.0, arrival_s=49.0)
    brain.arrived(request.info)
    brain.interference.produced(request.info.rid, 50.0)
    seen = snapshot(request, offline(10, DECODING), now_s=50.0)
    ran(brain, brain.plan(seen, NO_CACHE), seen, seconds=0.5)  # Planned in time.
    (standing,) = brain.interference.monitor.report(60.0).standings
    assert standing.measured_s == pytest.approx(0.5)
    assert not standing.is_met


def test_the_average_iteration_is_the_one_that_was_measured() -> None:
    policy = BrosPolicy()
    brain, seen = scheduler(policy), snapshot(online(10, DECODING))
    ran(brain, brain.plan(seen, NO_CACHE), seen, seconds=2.0)
    assert policy._mean_iteration_s == 2.0
