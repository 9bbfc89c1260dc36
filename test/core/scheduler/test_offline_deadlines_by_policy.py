"""Every planning policy keeps the deadlines of offline requests, from the latest start on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.scheduler.scenarios import NO_CACHE, decoded_for, queued, scheduler, snapshot
from sglang_coserve.core.policies import POLICIES

PLANNING = sorted(set(POLICIES) - {"online_only"})


@pytest.mark.parametrize("policy", PLANNING)
def test_a_request_whose_deadline_is_at_risk_is_first(policy: str) -> None:
    older = [queued(100, arrival_s=float(number)) for number in range(3)]
    due = replace(queued(100, rid="due", arrival_s=5.0), deadline_s=20.0)
    brain = scheduler(policy, *older, due)
    plan = brain.plan(snapshot(now_s=10.0, free_slots=1), NO_CACHE)
    assert [chunk.rid for chunk in plan.prefills] == ["due"]


@pytest.mark.parametrize("policy", PLANNING)
def test_a_request_with_time_left_waits_for_its_turn(policy: str) -> None:
    older = queued(100, rid="older", arrival_s=0.0)
    due = replace(queued(100, rid="due", arrival_s=5.0, first=5000), deadline_s=100_000.0)
    brain = scheduler(policy, older, due)
    plan = brain.plan(snapshot(now_s=10.0, free_slots=1), NO_CACHE)
    assert [chunk.rid for chunk in plan.prefills] == ["older"]


def test_urgency_begins_at_the_latest_start() -> None:
    """Both are due at the same time; one of them has twice as much to generate."""
    short = replace(queued(100, rid="short", arrival_s=0.0), deadline_s=1000.0)
    long = replace(queued(100, rid="long", arrival_s=5.0), deadline_s=1000.0, max_new_tokens=128)
    brain = scheduler("conserve")
    decoded_for(brain, tokens=3, token_s=5.0)
    for request in (short, long):
        brain.add_offline(request)

    def first(now_s: float) -> str:
        (chunk,) = brain.plan(snapshot(now_s=now_s, free_slots=1), NO_CACHE).prefills
        return chunk.rid

    # 64 tokens take 320 s, 128 take 640 s; at risk is what starts in less than 600 s.
    assert brain.queue.peek(0.0) is not None
    assert first(-250.0) == "short"
    assert first(-230.0) == "long"
