"""New offline requests leave the KV to prefixes that online requests come back to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from core.scheduler.policy_exceptions import RUNS_NO_OFFLINE, all_but
from core.scheduler.scenarios import (
    MODEL,
    NO_CACHE,
    Cache,
    offline,
    online,
    queued,
    ran,
    scheduler,
    snapshot,
)
from sglang_coserve.core.bottleneck import enough_requests
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.shadow_kv import Protection
from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
from sglang_coserve.core.planning.offline_phase import serve_offline
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.planning.step_memory import StepMemory
from sglang_coserve.core.policies import POLICIES
from sglang_coserve.core.policies.coserve import CoservePolicy
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.snapshot import EngineSnapshot, Request, SuspendedStep
from sglang_coserve.core.step import StepPlan
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.metrics import SloTargets

DECODING = RequestState.DECODING

KV_TOKENS = 100_000
SIXTEENTH = KV_TOKENS // 16
LATE = SloTargets(ttft_s=1000.0, tpot_s=100.0)
"""Targets under which only memory bounds offline work."""


def chatted(
    chat_tokens: int, *waiting: QueuedRequest, policy: str = "coserve", **config: object
) -> Scheduler:
    """A scheduler at 100 s, whose conversation of so many tokens has just had its second turn."""
    brain = scheduler(policy, targets=LATE, engine=EngineSize(kv_tokens=KV_TOKENS), **config)
    take_turns(brain, chat_tokens, 50.0, 99.0, until_s=99.9)
    for request in waiting:
        brain.add_offline(request)
    return brain


def take_turns(brain: Scheduler, chat_tokens: int, *times_s: float, until_s: float) -> None:
    """Serve a conversation at these times, each time with the same prompt."""
    chat = pack_tokens(range(chat_tokens))
    for number, now_s in enumerate(times_s):
        turn = online(chat_tokens, rid=f"turn-{number}", arrival_s=now_s)
        brain.arrived(turn.info, chat)
        serve(brain, turn, now_s)
        brain.finish(turn.info.rid, token_ids=chat)
    # The baseline drops a request when its next step begins.
    last = online(1, rid="last", arrival_s=until_s)
    brain.arrived(last.info)
    serve(brain, last, until_s)


def serve(brain: Scheduler, request: Request, now_s: float) -> None:
    """Compute a prompt in a step of its own."""
    seen = snapshot(request, now_s=now_s, max_batch_tokens=KV_TOKENS)
    ran(brain, brain.plan(seen, NO_CACHE), seen, seconds=0.01)


def seen_at(now_s: float, *requests: Request, **engine: object) -> EngineSnapshot:
    """All KV but that of the requests is free or can be evicted."""
    held = sum(request.computed_tokens for request in requests)
    room = {"free_kv_tokens": 0, "evictable_kv_tokens": KV_TOKENS - held}
    return snapshot(*requests, now_s=now_s, **{**room, **engine})


def admitted(plan: StepPlan) -> list[str]:
    return [chunk.rid for chunk in plan.prefills]


@pytest.fixture
def held() -> Request:
    """An offline request with 1,000 tokens of KV."""
    return offline(1000, computed=1000, rid="held")


# --- Protected tokens ---------------------------------------------------------------------


@pytest.mark.parametrize(("prompt_tokens", "fits"), [(37_000, True), (40_000, False)])
def test_a_request_is_admitted_into_what_protected_prefixes_leave(
    held: Request, prompt_tokens: int, fits: bool
) -> None:
    """Of 99,000 tokens beside ``held`` 60,000 are protected, and 512 are headroom."""
    brain = chatted(60_000, queued(prompt_tokens, rid="new"))
    assert admitted(brain.plan(seen_at(100.0, held), NO_CACHE)) == (["new"] if fits else [])


def test_a_prefix_is_protected_until_its_lease_ends(held: Request) -> None:
    brain = chatted(60_000, queued(40_000, rid="new"))
    # All prefixes stay until twice the lease after the first request.
    ends_s = 50.0 + 2 * brain.online_lease_s(1000.0)
    for now_s, expected in ((ends_s - 2.0, []), (ends_s + 2.0, ["new"])):
        assert admitted(brain.plan(seen_at(now_s, held), NO_CACHE)) == expected


def decoding(count: int, tokens: int) -> list[Request]:
    """Offline requests that decode, each with so many tokens."""
    return [offline(tokens, DECODING, rid=f"held-{number}") for number in range(count)]


def test_decodes_are_retracted_where_they_grow_into_protected_prefixes() -> None:
    """The last admitted first, until those left fit beside the prefixes."""
    for tokens, retracted in ((6_600, []), (6_700, ["held-5"])):
        plan = chatted(60_000).plan(seen_at(100.0, *decoding(6, tokens)), NO_CACHE)
        assert [one.rid for one in plan.retract] == retracted
        assert plan.batch.decode_requests == 6 - len(retracted)


def test_decodes_are_not_retracted_within_their_sixteenth() -> None:
    for tokens, num_retracted in ((1_500, 0), (SIXTEENTH // 4 + 1, 1)):
        plan = chatted(98_000).plan(seen_at(100.0, *decoding(4, tokens)), NO_CACHE)
        assert len(plan.retract) == num_retracted


def test_the_only_decode_goes_on_whatever_is_protected() -> None:
    plan = chatted(98_000).plan(seen_at(100.0, *decoding(1, 50_000)), NO_CACHE)
    assert not plan.retract
    assert plan.batch.decode_requests == 1


def test_an_offline_prefix_in_the_cache_needs_room_as_well(held: Request) -> None:
    """Once its request runs, it cannot be evicted in the place of a protected prefix."""
    brain = chatted(60_000, queued(40_000, rid="new"))
    assert not admitted(brain.plan(seen_at(100.0, held), Cache({"new": 39_000})))


@dataclass
class Hasty(CoservePolicy):
    """Admits whatever fits."""

    def compose(self, batch: StepBuilder) -> None:
        serve_offline(batch)


def admitted_at_once(
    chat_tokens: int, prompt_tokens: int, held: Request, monkeypatch: pytest.MonkeyPatch
) -> int:
    """How many of four equal requests a single plan admits."""
    waiting = [queued(prompt_tokens, first=10**6 * number) for number in range(4)]
    brain = chatted(chat_tokens, *waiting)
    monkeypatch.setattr(brain, "_policy", Hasty())
    seen = seen_at(100.0, held, max_batch_tokens=KV_TOKENS)
    return len(admitted(brain.plan(seen, NO_CACHE)))


def test_each_request_that_a_plan_admits_leaves_less_to_the_next(
    held: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert admitted_at_once(60_000, 15_000, held, monkeypatch) == 2


# --- A sixteenth --------------------------------------------------------------------------


@pytest.mark.parametrize("headroom_tokens", [0, 512, 100_000])
@pytest.mark.parametrize(("prompt_tokens", "fits"), [(SIXTEENTH - 1000, True), (SIXTEENTH, False)])
def test_a_sixteenth_of_the_kv_is_for_offline_requests_in_any_case(
    held: Request, prompt_tokens: int, fits: bool, headroom_tokens: int
) -> None:
    """Headroom for running requests is kept free, but not in this sixteenth."""
    brain = chatted(98_000, queued(prompt_tokens, rid="new"), headroom_tokens=headroom_tokens)
    plan = brain.plan(seen_at(100.0, held), NO_CACHE)
    assert admitted(plan) == (["new"] if fits else [])


def test_what_a_plan_admits_into_the_sixteenth_counts(
    held: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert admitted_at_once(98_000, 2_500, held, monkeypatch) == 2


def test_a_request_that_needs_more_than_a_sixteenth_runs_alone(held: Request) -> None:
    """It would wait as long as there are conversations, and the rest of its batch behind it."""
    brain = chatted(98_000, queued(2 * SIXTEENTH, rid="long"), queued(10, rid="short", first=10**6))
    seen = seen_at(100.0, held, max_batch_tokens=KV_TOKENS)
    assert not admitted(brain.plan(seen, NO_CACHE))
    seen = seen_at(100.0, max_batch_tokens=KV_TOKENS)
    assert admitted(brain.plan(seen, NO_CACHE)) == ["long"]


@pytest.mark.parametrize(
    ("protected_tokens", "added_tokens", "most_tokens"),
    # All that is free; beside the prefixes; of the eighth, where 2,000 tokens are held alone.
    [(60_000, 0, 28_000), (87_000, 0, 10_500), (87_000, 9_500, 1_000)],
)
def test_prefixes_stay_up_to_what_is_left_or_what_a_sixteenth_leaves(
    protected_tokens: int, added_tokens: int, most_tokens: int
) -> None:
    requests = (online(100, DECODING, computed=9_000), offline(100, computed=3_000, cached=1_000))
    seen = snapshot(*requests, free_kv_tokens=50_000, evictable_kv_tokens=38_000)
    memory = StepMemory(seen, list, Protection(protected_tokens, 1 / 8))
    assert memory.leaves_prefixes(most_tokens, added_tokens=added_tokens)
    assert not memory.leaves_prefixes(most_tokens + 1, added_tokens=added_tokens)


# --- No more than are worth their KV ------------------------------------------------------


def many(count: int) -> tuple[Request, ...]:
    """Offline requests that hold KV."""
    return tuple(offline(1000, rid=f"held-{number}") for number in range(count))


NEW = queued(1000, rid="new", first=10**6)


def most_requests() -> int:
    """Most offline requests of a plan: 1.5 times the number for 90% of the throughput, plus 1."""
    fewest = enough_requests(MODEL, StepStats(), 1000, 64, 1e9, 100)
    return -(-3 * fewest // 2) + 1


def test_there_are_no_more_requests_than_are_worth_their_kv() -> None:
    most = most_requests()
    assert 10 < most < 60
    for count, expected in ((most - 2, ["new"]), (most + 2, [])):
        seen = seen_at(100.0, *many(count))
        assert admitted(chatted(20_000, NEW).plan(seen, NO_CACHE)) == expected


@pytest.mark.parametrize("chat_tokens", [1, 6_000])
def test_few_tokens_to_come_back_to_do_not_limit_offline_requests(chat_tokens: int) -> None:
    """Less than a sixteenth of the KV, such as that of a system prompt."""
    seen = seen_at(100.0, *many(most_requests() + 10))
    assert admitted(chatted(chat_tokens, NEW).plan(seen, NO_CACHE))


def first_turn(chat_tokens: int) -> Scheduler:
    """A scheduler that does not know yet whether anything comes back."""
    brain = scheduler("coserve", targets=LATE, engine=EngineSize(kv_tokens=KV_TOKENS))
    take_turns(brain, chat_tokens, 1.0, until_s=90.0)
    return brain


def test_while_reuse_is_unknown_all_recent_prefixes_limit_their_number() -> None:
    brain = first_turn(20_000)
    brain.add_offline(NEW)
    requests = many(most_requests() + 2)
    assert not admitted(brain.plan(seen_at(100.0, *requests), NO_CACHE))
    assert admitted(brain.plan(seen_at(400.0, *requests), NO_CACHE)), "nothing has come back"


@pytest.mark.parametrize(("prompt_tokens", "fits"), [(23_000, True), (25_000, False)])
def test_while_reuse_is_unknown_a_quarter_is_for_offline_requests(
    held: Request, prompt_tokens: int, fits: bool
) -> None:
    brain = first_turn(98_000)
    brain.add_offline(queued(prompt_tokens, rid="new"))
    seen = seen_at(100.0, held, max_batch_tokens=KV_TOKENS)
    assert admitted(brain.plan(seen, NO_CACHE)) == (["new"] if fits else [])
    assert admitted(brain.plan(replace(seen, now_s=400.0), NO_CACHE)) == ["new"]


def test_requests_of_a_suspended_step_are_not_among_them() -> None:
    """They hold KV, but do no work until their step goes on."""
    brain = chatted(20_000, NEW)
    suspended = SuspendedStep(7, StepStats.of(decodes=[100] * 60), 0.5, since_s=0.0)
    prompt = online(100, arrival_s=100.0)
    plans = [
        brain.plan(seen_at(100.0, prompt, stop_share=0.25, suspended=step), NO_CACHE)
        for step in (suspended, None)
    ]
    assert [admitted(plan)[-1] for plan in plans] == ["new", "new"]


@pytest.mark.parametrize(
    "policy",
    [name for name in all_but(RUNS_NO_OFFLINE) if not POLICIES[name].protects_prefixes],
)
def test_a_policy_that_protects_no_prefixes_takes_all_kv(held: Request, policy: str) -> None:
    brain = chatted(60_000, queued(40_000, rid="new"), policy=policy)
    seen = seen_at(100.0, held, max_batch_tokens=KV_TOKENS)
    assert admitted(brain.plan(seen, NO_CACHE)) == ["new"]
    assert brain.online_lease_s(100.0) == 0.0
