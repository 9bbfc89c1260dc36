"""What requests of a step share is computed once, if that is worth a step: 10 ms, 100 tokens."""

from __future__ import annotations

import pytest

from core.scheduler.scenarios import NO_CACHE, Cache, offline, ran, scheduler, snapshot
from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
from sglang_coserve.core.request import RequestState

OWN_TOKENS = 20


def waiting(
    rid: str, group: int, shared_tokens: int, own_tokens: int = OWN_TOKENS
) -> QueuedRequest:
    own = range(10_000 * ord(rid[-1]), 10_000 * ord(rid[-1]) + own_tokens)
    tokens = [group] * shared_tokens + list(own)
    return QueuedRequest(rid, pack_tokens(tokens), arrival_s=0.0, max_new_tokens=8)


def prefilled(*requests: QueuedRequest, cache: Cache = NO_CACHE, page_tokens: int = 1) -> list[str]:
    seen = snapshot(page_tokens=page_tokens)
    plan = scheduler("coserve", *requests).plan(seen, cache)
    return [chunk.rid for chunk in plan.prefills]


def test_the_others_of_a_group_are_left_for_the_next_step() -> None:
    group = [waiting(f"a{n}", 1, 400) for n in range(3)]
    assert prefilled(*group, waiting("b0", 2, 400), waiting("c0", 3, 400)) == ["a0", "b0", "c0"]


def test_they_are_in_once_it_is_cached() -> None:
    group = [waiting(f"a{n}", 1, 400) for n in range(3)]
    cache = Cache({request.rid: 400 for request in group})
    assert prefilled(*group, cache=cache) == ["a0", "a1", "a2"]


@pytest.mark.parametrize(("shared_tokens", "number"), [(90, 3), (120, 1)])
def test_little_in_common_is_not_worth_a_step(shared_tokens: int, number: int) -> None:
    assert len(prefilled(*(waiting(f"a{n}", 1, shared_tokens) for n in range(3)))) == number


def test_only_whole_pages_are_cached() -> None:
    group = [waiting(f"a{n}", 1, 120) for n in range(3)]
    assert len(prefilled(*group, page_tokens=64)) == 3
    assert len(prefilled(*group, page_tokens=8)) == 1


def test_without_a_prefix_cache_nobody_waits_for_others() -> None:
    brain = scheduler("coserve", *(waiting(f"a{n}", 1, 400) for n in range(3)))
    assert len(brain.plan(snapshot(keeps_prefixes=False), NO_CACHE).prefills) == 3


def test_equal_prompts_compute_their_last_token_each() -> None:
    equal = [waiting(rid, 1, 400, own_tokens=0) for rid in ("a0", "a1", "a2")]
    assert prefilled(*equal) == ["a0"]
    assert len(prefilled(*equal, cache=Cache(dict.fromkeys(("a0", "a1", "a2"), 399)))) == 3


def test_the_rest_of_a_prompt_that_was_cut_is_not_computed_beside_it() -> None:
    group = [waiting(f"a{n}", 1, 400) for n in range(3)]
    brain = scheduler("coserve", *group)
    seen = snapshot(max_batch_tokens=150)
    plan = brain.plan(seen, NO_CACHE)
    assert [(chunk.rid, chunk.tokens) for chunk in plan.prefills] == [("a0", 150)]
    ran(brain, plan, seen)
    request = offline(420, RequestState.PREFILLING, rid="a0", computed=150)
    cache = Cache({"a1": 150, "a2": 150})
    again = brain.plan(snapshot(request), cache)
    assert [(chunk.rid, chunk.tokens) for chunk in again.prefills] == [("a0", 270)]
