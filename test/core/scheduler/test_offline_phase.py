"""Offline work fills what online work leaves, to the token."""

from __future__ import annotations

import math

import pytest

from core.scheduler.scenarios import (
    MODEL,
    NO_CACHE,
    Cache,
    offline,
    online,
    queued,
    rids,
    scheduler,
    snapshot,
)
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.step import PrefillChunk
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.metrics import SloTargets

DECODING, PAUSED = RequestState.DECODING, RequestState.PAUSED
PARKED, PREFILLING = RequestState.PARKED, RequestState.PREFILLING


def test_decodes_that_do_not_fit_pause_the_last_first() -> None:
    """Each offline decode of 100,000 tokens takes 10 ms and more; 90 ms are left."""
    requests = [offline(100_000) for _ in range(10)]
    plan = scheduler("coserve").plan(snapshot(online(10, DECODING), *requests), NO_CACHE)
    running = plan.batch.decode_requests - 1
    assert 0 < running < 10
    assert plan.pause == rids(requests[running:])
    longer = plan.batch.with_decode(100_000)
    assert plan.predicted_s <= 0.1 < MODEL.predict(longer)


def test_a_decode_that_cannot_pause_is_retracted_where_others_pause() -> None:
    """All but its last page stays in the prefix cache, so that it loses little."""
    requests = (
        online(10, DECODING, last_token_s=-5.0),
        offline(100, computed=100, can_pause=False),
        offline(),
    )
    plan = scheduler("coserve").plan(snapshot(*requests, page_tokens=16), NO_CACHE)
    assert plan.pause == rids(requests[2:])
    assert plan.retract == ((requests[1].info.rid, 4),)
    assert plan.batch.decode_requests == 1


def test_a_step_of_decodes_alone_may_have_more_tokens_than_one_with_prompts() -> None:
    requests = [*(online(10, DECODING) for _ in range(6)), *(offline(10) for _ in range(10))]
    core = scheduler("coserve", queued())
    plan = core.plan(snapshot(*requests, max_batch_tokens=4), NO_CACHE)
    assert plan.batch.decode_requests == 16
    assert not plan.prefills


def test_decodes_that_cannot_pause_run_before_those_that_can() -> None:
    requests = [offline(100_000) for _ in range(9)] + [offline(100_000, can_pause=False)]
    plan = scheduler("coserve").plan(snapshot(online(10, DECODING), *requests), NO_CACHE)
    assert not plan.retract
    assert plan.pause


@pytest.mark.parametrize("can_pause", [True, False])
def test_offline_work_counts_as_offline_whether_it_can_pause_or_not(can_pause: bool) -> None:
    requests = [offline(can_pause=can_pause) for _ in range(50)]
    plan = scheduler("coserve").plan(snapshot(online(10, DECODING), *requests), NO_CACHE)
    assert plan.batch.decode_requests == 51
    assert plan.online_part_s == MODEL.predict(StepStats.of(decodes=[10]))
    alone = scheduler("coserve").plan(snapshot(*requests), NO_CACHE)
    assert alone.online_part_s == 0.0


def test_a_chunk_is_the_longest_under_the_budget() -> None:
    decode = online(10, DECODING)
    plan = scheduler("coserve", queued(5000, rid="long")).plan(snapshot(decode), NO_CACHE)
    decodes = StepStats().with_decode(decode.computed_tokens)
    longest = MODEL.max_prefill_tokens(decodes, 0, 5000, 0.1)
    assert plan.prefills == (PrefillChunk("long", longest),)


def test_a_chunk_ends_with_a_page() -> None:
    plan = scheduler("coserve", queued(5000)).plan(
        snapshot(online(10, DECODING), page_tokens=64), NO_CACHE
    )
    assert plan.prefills[0].tokens % 64 == 0


def test_scraps_are_not_worth_a_chunk() -> None:
    """20 tokens of time are left, and a chunk shall have 32."""
    waiting = queued(5000)
    plan = scheduler("coserve", waiting, min_chunk_tokens=32, iteration_budget_s=0.0123).plan(
        snapshot(online(10, DECODING)), NO_CACHE
    )
    assert not plan.prefills


def test_what_was_begun_goes_on_before_the_queue() -> None:
    parked = offline(300, PARKED, computed=100, generated=0)
    begun = offline(300, PREFILLING, computed=100, generated=0)
    plan = scheduler("coserve", queued(50, rid="new")).plan(
        snapshot(online(10, DECODING), parked, begun), NO_CACHE
    )
    assert [tuple(chunk) for chunk in plan.prefills] == [
        (begun.info.rid, 200),
        (parked.info.rid, 200),
        ("new", 50),
    ]


def test_an_unfinished_prefill_is_parked_for_an_online_one() -> None:
    begun = offline(3000, PREFILLING, computed=100, generated=0)
    plan = scheduler("coserve").plan(snapshot(online(10, DECODING), begun, online(5000)), NO_CACHE)
    assert plan.park == rids([begun])


def test_at_most_one_prompt_is_left_unfinished() -> None:
    waiting = [queued(700, first=number * 1000) for number in range(5)]
    plan = scheduler("conserve", *waiting).plan(snapshot(online(10, DECODING)), NO_CACHE)
    assert [chunk.tokens == 700 for chunk in plan.prefills] == [True, False]


@pytest.mark.parametrize(("cached_tokens", "tokens"), [(80, 20), (100, 1)])
def test_what_is_cached_is_not_computed_but_for_the_last_token(
    cached_tokens: int, tokens: int
) -> None:
    cache = Cache({"hit": cached_tokens})
    plan = scheduler("coserve", queued(100, rid="hit")).plan(snapshot(), cache)
    assert plan.prefills == (PrefillChunk("hit", tokens),)


@pytest.mark.parametrize("limit", ["max_picks", "max_offline_requests"])
def test_picks_and_requests_are_bounded(limit: str) -> None:
    waiting = [queued(64) for _ in range(9)]
    plan = scheduler("coserve", *waiting, **{limit: 4}).plan(snapshot(), NO_CACHE)
    assert len(plan.prefills) == 4


@pytest.mark.parametrize(
    ("running", "headroom_tokens", "fitting_tokens"),
    [
        pytest.param((1000, 1000), 50, 80, id="so much for each"),
        pytest.param((310, 310), 500, 80, id="at most an eighth of all, here of 800"),
        pytest.param((), 50, 180, id="an empty engine needs none"),
    ],
)
def test_admission_leaves_running_requests_room_to_grow(
    running: tuple[int, ...], headroom_tokens: int, fitting_tokens: int
) -> None:
    """180 slots are free."""
    seen = snapshot(*map(offline, running), free_kv_tokens=180)
    for tokens in (fitting_tokens - 10, fitting_tokens + 10):
        brain = scheduler("coserve", queued(tokens), headroom_tokens=headroom_tokens)
        plan = brain.plan(seen, NO_CACHE)
        assert len(plan.prefills) == (tokens < fitting_tokens)
        assert not plan.retract


def test_who_was_admitted_in_the_same_step_is_left_room_too() -> None:
    """Two of 480 tokens fit into 1,000 slots, but not with a headroom of 100 for the first."""
    waiting = [queued(480, first=first) for first in (0, 1000)]
    seen = snapshot(free_kv_tokens=1000)
    for headroom_tokens, admitted in ((0, 2), (100, 1)):
        plan = scheduler("coserve", *waiting, headroom_tokens=headroom_tokens).plan(seen, NO_CACHE)
        assert len(plan.prefills) == admitted


def test_the_last_decode_pauses_rather_than_starting_over() -> None:
    plan = scheduler("coserve").plan(
        snapshot(online(1000, DECODING), offline(100), free_kv_tokens=1), NO_CACHE
    )
    assert not plan.retract
    assert len(plan.pause) == 1


@pytest.mark.parametrize("policy", ["conserve", "coserve"])
def test_a_step_is_as_long_as_a_high_throughput_needs(policy: str) -> None:
    """Where attention dominates, a longer prefill is not a faster one: sqrt(0.01/1e-8) = 1000.
    Of the sizes tried, 1024 is the least that has 95% of that throughput."""
    model = PolynomialModel.of(attention_pair_s=1e-8, iteration_s=0.010, compute_token_s=1e-6)
    core = scheduler(policy, queued(8192), model=model, targets=SloTargets())
    plan = core.plan(snapshot(), NO_CACHE)
    assert [chunk.tokens for chunk in plan.prefills] == [1024]
    assert plan.budget_s == math.inf


@pytest.mark.parametrize("ttft_ms", [100, 200])
def test_before_any_request_came_an_arrival_waits_for_half_of_its_target(ttft_ms: int) -> None:
    brain = scheduler("coserve", queued(8000), slos=[f"ttft p99 <= {ttft_ms}ms"])
    longest_s = ttft_ms / 2000
    assert longest_s - 0.01 < brain.plan(snapshot(), NO_CACHE).predicted_s <= longest_s


@pytest.mark.parametrize("stop_share", [1.0, 0.25])
def test_no_budget_makes_a_step_without_online_work_mostly_fixed_cost(stop_share: float) -> None:
    """It takes up to twice its fixed cost, however short arrivals may wait."""
    strict = scheduler("coserve", queued(8000), targets=SloTargets(ttft_s=0.001))
    rows = [offline(100, DECODING)]
    plan = strict.plan(snapshot(*rows, stop_share=stop_share), NO_CACHE)
    fixed_s = MODEL.predict(StepStats.of([(1, 0)]))
    assert len(plan.prefills) == plan.batch.decode_requests == 1
    assert 1.9 * fixed_s < plan.predicted_s <= 2 * fixed_s


def test_a_budget_that_nothing_keeps_does_not_stop_an_idle_engine() -> None:
    rows = [offline(500_000, DECODING)]
    plan = scheduler("coserve", targets=SloTargets(ttft_s=0.001)).plan(snapshot(*rows), NO_CACHE)
    assert plan.batch.decode_requests == 1
    assert plan.budget_s == math.inf


def test_a_request_whose_kv_is_being_loaded_does_not_hold_up_the_others() -> None:
    """It is the first of the queue, and longer than a step."""
    waiting = [queued(300, rid=f"q{i}", first=100_000 * i, arrival_s=i) for i in range(1, 11)]
    brain = scheduler("coserve", queued(16_000, rid="loading"), *waiting)
    decodes = [online(500, DECODING) for _ in range(4)]
    plan = brain.plan(snapshot(*decodes, now_s=0.0), Cache({"loading": None}))
    assert [chunk.rid for chunk in plan.prefills][:1] == ["q1"]


# --- What is looked up --------------------------------------------------------------------


class CountedCache(Cache):
    """An empty prefix cache that remembers whose prompts were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def cached_tokens(self, rid: str) -> int | None:
        self.asked.append(rid)
        return super().cached_tokens(rid)


def test_only_those_that_a_plan_reaches_are_looked_up() -> None:
    """A lookup costs more than all the rest of admitting a request."""
    cache = CountedCache()
    waiting = [queued(100, rid=rid, first=1000 * place) for place, rid in enumerate("abc")]
    plan = scheduler("conserve", *waiting).plan(snapshot(max_batch_tokens=150), cache)
    assert [chunk.rid for chunk in plan.prefills] == cache.asked == ["a", "b"]
