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


def test_the_time_of_a_part_teaches_the_model_of_that_part() -> None:
    brain = scheduler("coserve", *(queued(300, rid=f"q{i}", first=1000 * i) for i in range(3)))
    seen = snapshot()
    plan = brain.plan(seen, NO_CACHE)
    part_s = MODEL.predict(StepStats.of([(300, 0)]))
    ran(brain, plan, seen, admitted=plan.prefills[:1], seconds=part_s)
    assert brain.prediction_error.mape == 0.0


# --- A step of which nothing came ---------------------------------------------------------


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
