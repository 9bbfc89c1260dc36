"""Where the time of steps went, and what was decided of them, in words."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from core.scheduler.scenarios import (
    MODEL,
    NO_CACHE,
    offline,
    online,
    queued,
    ran,
    scheduler,
    snapshot,
)
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.snapshot import EngineSnapshot
from sglang_coserve.core.step import Lane, StepPlan, StepResult
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.core.work_log import DecisionLog, Subject, WorkLog

DECODING = RequestState.DECODING


def texts(brain: Scheduler, now_s: float = 10.0) -> list[str]:
    return [each["text"] for each in brain.work.decisions.to_list(now_s)]


def lane(seen: EngineSnapshot) -> EngineSnapshot:
    """The same engine where steps of offline requests can be suspended at once."""
    return replace(seen, stop_share=0.01)


def test_time_and_tokens_are_those_of_both_classes() -> None:
    brain = scheduler()
    seen = snapshot(online(10, DECODING), offline(10, DECODING))
    plan = brain.plan(seen, NO_CACHE)
    alone_s = plan.online_part_s
    ran(brain, plan, seen, seconds=0.05)
    totals = brain.work.totals
    assert totals.steps == 1
    assert totals.online_s == pytest.approx(alone_s)
    assert totals.offline_s == pytest.approx(0.05 - alone_s)
    assert (totals.online_tokens, totals.offline_tokens) == (1, 1)
    assert totals.granted_s == pytest.approx(plan.budget_s - alone_s)


def test_chunks_count_by_their_tokens() -> None:
    prompt = queued(300)
    brain = scheduler("conserve", prompt)
    request = online(100)
    seen = snapshot(request, offline(10, DECODING))
    plan = brain.plan(seen, NO_CACHE)
    tokens = dict(plan.prefills)
    assert tokens[request.info.rid] == 100
    ran(brain, plan, seen)
    assert brain.work.totals.online_tokens == 100
    assert brain.work.totals.offline_tokens == tokens.get(prompt.rid, 0) + 1


def test_what_a_dropped_step_took_is_lost() -> None:
    brain = scheduler("coserve", queued(300))
    plan = brain.plan(snapshot(), NO_CACHE)
    brain.start(plan, plan.prefills)
    brain.update(StepResult(plan.step, 0.0, seconds=0.02, dropped=("a",)))
    totals = brain.work.totals
    assert (totals.lost_s, totals.dropped_steps, totals.steps) == (0.02, 1, 0)
    assert texts(brain) == [Subject.DROPPED.value]


def test_a_step_nobody_waits_for_says_so() -> None:
    brain = scheduler("coserve", queued(300))
    seen = lane(snapshot())
    plan = brain.plan(seen, NO_CACHE)
    ran(brain, plan, seen)
    (text,) = texts(brain)
    assert text == f"Offline steps of {plan.predicted_s * 1e3:.3g} ms: " + (
        "no online request runs or waits."
    )


@pytest.mark.parametrize(
    ("predicted_s", "text"),
    [
        (0.05, "Offline steps limited to 18 ms: the next online token is due then"),
        (0.012, "Offline steps of 12 ms fit before the next online token is due."),
    ],
)
def test_a_step_between_two_online_tokens_says_whether_it_fits(
    predicted_s: float, text: str
) -> None:
    batch = StepStats.of([(100, 0)])
    plan = StepPlan(lane=Lane.OFFLINE, until_s=5.018, batch=batch, predicted_s=predicted_s)
    log = WorkLog()
    log.ended(plan, StepResult(plan.step, 5.0, predicted_s, batch), 0.0, predicted_s)
    (entry,) = log.decisions.to_list(6.0)
    assert entry["text"].startswith(text)
    assert log.totals.granted_s == pytest.approx(0.018)
    assert log.totals.offline_s == predicted_s


def test_who_arrives_meanwhile_limits_a_step() -> None:
    """One request is served; who comes next may wait 20 ms for offline work."""
    brain = scheduler("coserve", queued(8000), slos=["ttft p99 <= 40ms", "tpot p99 <= 100ms"])
    seen = snapshot(online(10, DECODING), offline(10, DECODING))
    ran(brain, brain.plan(seen, NO_CACHE), seen)
    assert any("20 ms" in text and "arrives meanwhile" in text for text in texts(brain))


def test_no_time_beside_online_requests_is_told() -> None:
    brain = scheduler("coserve", queued(100))
    late = online(10, DECODING, last_token_s=-5.0)
    seen = snapshot(late)
    plan = brain.plan(seen, NO_CACHE)
    assert not plan.prefills
    ran(brain, plan, seen)
    assert texts(brain) == [Subject.NONE_BESIDE.value]


def test_steps_without_a_plan_count() -> None:
    brain = scheduler()
    seen = snapshot(online(10, DECODING))
    result = ran(brain, brain.plan(seen, NO_CACHE), seen)
    unplanned = StepResult(None, 1.0, 0.02, result.batch, served=result.served)
    brain.update(unplanned)
    assert brain.work.totals.steps == 2
    assert brain.work.totals.online_s == pytest.approx(MODEL.predict(result.batch) + 0.02, rel=0.1)


def test_decisions_of_a_kind_are_one_entry() -> None:
    log = DecisionLog()
    for number in range(10):
        log.note(Subject.CUT, 0.01 + number / 1e3, number / 10)
        log.note(Subject.RETRACTED, 100, number / 10)
    found = log.to_list(now_s=1.0)
    assert len(found) == 2
    by_subject = {each["subject"]: each for each in found}
    assert by_subject["cut"]["text"].startswith("Offline steps limited to 10 to 19 ms:")
    assert by_subject["retracted"]["text"].startswith("KV of 1,000 tokens taken back")
    assert by_subject["cut"]["steps"] == 10
    assert by_subject["cut"]["age_s"] == pytest.approx(0.1)


def test_the_only_kind_stays_one_entry_and_others_begin_new_ones() -> None:
    log = DecisionLog()
    for at_s in range(100):
        log.note(Subject.NONE_BESIDE, 0.0, float(at_s))
    (only,) = log.to_list(now_s=100.0)
    assert (only["steps"], only["span_s"]) == (100, 99.0)
    log.note(Subject.DROPPED, 0.0, 100.0)
    log.note(Subject.NONE_BESIDE, 0.0, 101.0)
    assert [each["steps"] for each in log.to_list(102.0)] == [1, 1, 100]


def test_the_log_is_bounded() -> None:
    log = DecisionLog()
    for number in range(1000):
        log.note(Subject.CUT, 0.01, 100.0 * number)
        log.note(Subject.SHED, 1, 100.0 * number)
    assert len(log.to_list(0.0)) <= 40


@pytest.mark.parametrize("subject", Subject)
def test_every_subject_is_a_sentence(subject: Subject) -> None:
    log = DecisionLog()
    log.note(subject, 1.0, 0.0)
    (entry,) = log.to_list(0.0)
    assert re.fullmatch(r"[A-Z0-9][^{}]+\.", entry["text"])
