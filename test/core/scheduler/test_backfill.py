"""An offline prompt that does not fit holds up the others for half of the time at most."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.scheduler.policy_exceptions import IGNORES_CLASSES, RUNS_NO_OFFLINE, all_but
from core.scheduler.scenarios import NO_CACHE, offline, online, queued, scheduler, snapshot
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import EngineSnapshot, Request

DECODING, PARKED = RequestState.DECODING, RequestState.PARKED
OFFLINE_BESIDE_ONLINE = all_but(IGNORES_CLASSES | RUNS_NO_OFFLINE)
KV_TOKENS = 10_000


def seen_with(*requests: Request, now_s: float = 0.0) -> EngineSnapshot:
    held_tokens = sum(request.computed_tokens for request in requests)
    return snapshot(*requests, now_s=now_s, free_kv_tokens=KV_TOKENS - held_tokens)


def stream(now_s: float) -> Request:
    """An online request that decodes, and has just had a token."""
    return online(100, DECODING, last_token_s=now_s)


@pytest.mark.parametrize("policy", OFFLINE_BESIDE_ONLINE)
def test_others_go_on_behind_prompts_for_which_online_requests_leave_no_kv(policy: str) -> None:
    giants = [queued(9_000, rid=f"giant-{number}", arrival_s=-1.0) for number in range(100)]
    core = scheduler(policy, *giants, queued(50, rid="small", first=100_000))
    plan = core.plan(seen_with(online(2_000, DECODING, tpot_s=1.0)), NO_CACHE)
    assert [chunk.rid for chunk in plan.prefills] == ["small"]
    plan = core.plan(seen_with(), NO_CACHE)
    assert plan.prefills[0].rid.startswith("giant")


def test_a_begun_prompt_for_which_online_requests_leave_no_kv_is_passed_over() -> None:
    begun = offline(9_000, PARKED, generated=0, computed=500)
    core = scheduler("coserve", queued(50, rid="small"))
    plan = core.plan(seen_with(online(2_000, DECODING), begun), NO_CACHE)
    assert [chunk.rid for chunk in plan.prefills] == ["small"]


@pytest.mark.parametrize(
    ("age_s", "waits"), [(0, True), (60, True), (89, True), (91, False), (119, False), (121, True)]
)
def test_a_prompt_that_needs_most_of_the_kv_is_waited_for_half_of_the_time(
    age_s: float, waits: bool
) -> None:
    core = scheduler("coserve", queued(8_000, rid="giant"), queued(50, rid="small", first=100_000))
    # It fits once the offline request has ended.
    seen = seen_with(stream(age_s), offline(3_000), now_s=age_s)
    planned = [chunk.rid for chunk in core.plan(seen, NO_CACHE).prefills]
    assert planned == ([] if waits else ["small"])


def test_a_prompt_that_needs_little_of_the_kv_is_always_waited_for() -> None:
    core = scheduler("coserve", queued(3_000, rid="first"), queued(50, rid="small", first=100_000))
    for age_s in (0.0, 70.0, 100.0, 1_000.0):
        seen = seen_with(stream(age_s), offline(8_000), now_s=age_s)
        assert not core.plan(seen, NO_CACHE).prefills


@settings(max_examples=50, deadline=None)
@given(
    # Where online requests hold more than half, new offline ones would crowd them out.
    online_tokens=st.integers(100, 4_900),
    lengths=st.lists(st.integers(1, KV_TOKENS), min_size=1, max_size=20),
    policy=st.sampled_from(OFFLINE_BESIDE_ONLINE),
)
def test_some_offline_prompt_begins_whenever_one_fits(
    online_tokens: int, lengths: list[int], policy: str
) -> None:
    requests = [queued(tokens, first=number * 20_000) for number, tokens in enumerate(lengths)]
    core = scheduler(policy, *requests)
    # Of the KV an eighth is kept free at most.
    fits = min(lengths) <= KV_TOKENS - online_tokens - KV_TOKENS // 8
    plan = core.plan(seen_with(online(online_tokens, DECODING, tpot_s=10.0)), NO_CACHE)
    assert plan.prefills or not fits
