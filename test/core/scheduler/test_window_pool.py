"""Plans where layers with a sliding window keep their KV in a pool of its own, which is short."""

from __future__ import annotations

import pytest

from core.scheduler.policy_exceptions import KEEPS_OFFLINE_KV, all_but
from core.scheduler.scenarios import NO_CACHE, offline, online, queued, rids, scheduler, snapshot
from sglang_coserve.core.policies import POLICIES
from sglang_coserve.core.request import RequestState

DECODING, PARKED = RequestState.DECODING, RequestState.PARKED
WINDOW = 64


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_longer_than_the_pool_is_computed(policy: str) -> None:
    """It leaves its slots behind the window; the engine cuts its chunks."""
    prompt = online(1000)
    seen = snapshot(prompt, window_tokens=WINDOW, free_window_tokens=2 * WINDOW)
    plan = scheduler(policy).plan(seen, NO_CACHE)
    assert [chunk.rid for chunk in plan.prefills] == list(rids([prompt]))


@pytest.mark.parametrize("policy", all_but(KEEPS_OFFLINE_KV))
def test_offline_requests_leave_it_for_an_online_prompt(policy: str) -> None:
    """One request leaves a window, however long it is."""
    requests = [offline(1000) for _ in range(4)]
    seen = snapshot(online(1000), *requests, window_tokens=WINDOW, free_window_tokens=10)
    plan = scheduler(policy).plan(seen, NO_CACHE)
    assert len(plan.retract) == 1
    assert len(plan.prefills) == 1


def test_an_offline_request_waits_for_a_window() -> None:
    brain = scheduler("coserve", queued(10))
    short = snapshot(offline(100), window_tokens=WINDOW, free_window_tokens=WINDOW - 1)
    assert not brain.plan(short, NO_CACHE).prefills
    enough = snapshot(offline(100), window_tokens=WINDOW, free_window_tokens=WINDOW + 1)
    assert brain.plan(enough, NO_CACHE).prefills


def test_a_begun_prompt_takes_the_slots_of_another_when_nothing_else_runs() -> None:
    begun = [offline(900, PARKED, computed=300) for _ in range(3)]
    seen = snapshot(*begun, window_tokens=WINDOW, free_window_tokens=0)
    plan = scheduler("coserve").plan(seen, NO_CACHE)
    assert len(plan.retract) >= 1
    assert [chunk.rid for chunk in plan.prefills] == list(rids(begun[:1]))


def test_each_decode_takes_a_slot() -> None:
    requests = [offline(100) for _ in range(WINDOW + 10)]
    seen = snapshot(*requests, window_tokens=WINDOW, free_window_tokens=WINDOW)
    plan = scheduler("coserve").plan(seen, NO_CACHE)
    assert plan.retract
    assert plan.batch.decode_requests + len(plan.retract) == len(requests)
