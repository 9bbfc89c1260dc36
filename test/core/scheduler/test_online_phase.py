"""Online work comes first, in order, and as much of it as the deadlines allow."""

from __future__ import annotations

import math

import pytest

from core.scheduler.scenarios import (
    MODEL,
    NO_CACHE,
    offline,
    online,
    queued,
    rids,
    scheduler,
    snapshot,
)
from sglang_coserve.core.policies import POLICIES
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import Overload
from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.metrics import SloTargets

DECODING, PAUSED = RequestState.DECODING, RequestState.PAUSED
STEP = StepStats.of(decodes=[100])
PARKED, PREFILLING = RequestState.PARKED, RequestState.PREFILLING


def test_every_online_decode_runs_even_late() -> None:
    requests = [online(state=DECODING, last_token_s=-5.0) for _ in range(3)]
    plan = scheduler("coserve").plan(snapshot(*requests), NO_CACHE)
    assert plan.batch.decode_requests == 3
    assert not plan.pause


def test_prompts_join_in_order_of_arrival() -> None:
    requests = [online(50), online(50), online(50)]
    plan = scheduler("coserve").plan(snapshot(*requests), NO_CACHE)
    assert [chunk.rid for chunk in plan.prefills] == [*rids(requests)]


def test_the_unfinished_prompt_goes_on_before_others() -> None:
    waiting, begun = online(50), online(50, PREFILLING, computed=16)
    plan = scheduler("coserve").plan(snapshot(waiting, begun), NO_CACHE)
    assert [tuple(chunk) for chunk in plan.prefills] == [
        (begun.info.rid, 34),
        (waiting.info.rid, 50),
    ]


def test_a_chunk_is_as_long_as_the_decodes_allow() -> None:
    decode, prompt = online(state=DECODING), online(5000)
    plan = scheduler("coserve").plan(snapshot(decode, prompt), NO_CACHE)
    (chunk,) = plan.prefills
    decodes = StepStats().with_decode(decode.computed_tokens)
    assert plan.predicted_s <= 0.1
    assert MODEL.predict(decodes.with_prefill(chunk.tokens + 1, 0)) > 0.1
    assert plan.expected.is_deadline_bound


def test_a_late_token_shortens_the_chunk() -> None:
    """The decode's last token is 60 ms old, so 40 ms are left of its 100 ms."""
    decode, prompt = online(state=DECODING, last_token_s=-0.06), online(5000)
    plan = scheduler("coserve").plan(snapshot(decode, prompt), NO_CACHE)
    assert 0.03 < plan.predicted_s <= 0.04


def test_requests_have_targets_of_their_own() -> None:
    decode, prompt = online(state=DECODING, tpot_s=0.05), online(5000)
    plan = scheduler("coserve").plan(snapshot(decode, prompt), NO_CACHE)
    assert 0.04 < plan.predicted_s <= 0.05


def test_a_later_prompt_does_not_make_an_earlier_one_late() -> None:
    """The first prompt is due in 60 ms and takes 30: the second gets what is left."""
    first, second = online(200, arrival_s=-0.94), online(5000, arrival_s=-0.1)
    plan = scheduler("coserve", targets=SloTargets(ttft_s=1.0)).plan(
        snapshot(first, second), NO_CACHE
    )
    assert [chunk.rid for chunk in plan.prefills] == [*rids([first, second])]
    assert 0.05 < plan.predicted_s <= 0.06


def test_nobody_is_left_behind_to_be_late_for_another_who_is_in_time() -> None:
    """Each takes 30 ms, both 50, and one is due in 45. Next, the other one would be done in 60."""
    core = scheduler("coserve", targets=SloTargets(ttft_s=1.0))
    for due_s, runs in ((0.07, 1), (0.055, 2)):
        requests = online(200, arrival_s=-0.955), online(200, arrival_s=due_s - 1.0)
        plan = core.plan(snapshot(*requests), NO_CACHE)
        whole = [chunk for chunk in plan.prefills if chunk.tokens == 200]
        assert [chunk.rid for chunk in whole] == [*rids(requests[:runs])]


def many_decodes(count: int = 100, **fields: object) -> list[Request]:
    """Take 20 ms a step, of which 10 ms are for them."""
    return [online(10, DECODING, **fields) for _ in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("due_s", "goes_first"), [(0.045, False), (0.035, True)])
def test_prompts_go_first_where_the_decodes_beside_them_would_make_one_late(
    due_s: float, goes_first: bool
) -> None:
    """The prompt takes 20 ms alone, 30 beside the decodes."""
    prompt = online(100, arrival_s=due_s - 1.0)
    plan = scheduler("coserve", queued()).plan(snapshot(*many_decodes(), prompt), NO_CACHE)
    assert plan.skips_decodes == goes_first
    assert plan.batch.decode_requests == (0 if goes_first else 100)
    assert not plan.pause
    assert (plan.budget_s == 0) == goes_first


@pytest.mark.parametrize(("arrival_wait_s", "goes_first"), [(0.041, False), (0.039, True)])
def test_prompts_go_first_where_one_that_arrives_meanwhile_would_wait_too_long(
    arrival_wait_s: float, goes_first: bool
) -> None:
    """The prompt takes 20 ms, and a step of the decodes as long."""
    targets = SloTargets(ttft_s=1.0, tpot_s=1.0)
    requests = [*many_decodes(), online(100)]
    core = scheduler("coserve", targets=targets, arrival_wait_s=arrival_wait_s)
    plan = core.plan(snapshot(*requests), NO_CACHE)
    assert plan.skips_decodes == goes_first


def test_decodes_that_cannot_wait_do_so_for_no_one_yet_to_arrive() -> None:
    """The prompt takes 510 ms, more than half the target, and is in time all the same."""
    decode, prompt = online(state=DECODING), online(5000)
    plan = scheduler("coserve").plan(snapshot(decode, prompt), NO_CACHE)
    assert not plan.skips_decodes
    assert plan.predicted_s <= 0.1


def with_gaps(core: Scheduler, gaps: int) -> Scheduler:
    """One request has ended that had so many gaps between its tokens."""
    request = online(10)
    core.arrived(request.info)
    for number in range(gaps + 1):
        core.interference.produced(request.info.rid, 0.01 * number)
    core.finish(request.info.rid)
    core.interference.advance(MODEL.predict, math.inf)
    return core


@pytest.mark.parametrize(("num_due", "waits"), [(0, True), (49, True), (50, False)])
def test_decodes_wait_where_their_late_gaps_are_a_smaller_part_of_all_than_a_first_token(
    num_due: int, waits: bool
) -> None:
    """The prompt has 35 ms; it takes 20 ms alone, and as long as the decodes, some of which are
    due in 39 ms, twice that beside them."""
    prompt = online(100, arrival_s=0.035 - 1.0)
    due = many_decodes(num_due, last_token_s=-0.061)
    requests = [*due, *many_decodes(100 - num_due), prompt]
    plan = with_gaps(scheduler("coserve"), 50).plan(snapshot(*requests), NO_CACHE)
    assert plan.skips_decodes == waits
    assert [chunk.rid for chunk in plan.prefills] == [prompt.info.rid]


def test_no_gap_is_longer_than_both_targets_together() -> None:
    """Eleven prompts of 110 ms each; a gap may last 1.1 s and has lasted 0.4 s. Not to cut a
    prompt, a batch may take a tenth more than it should."""
    prompts = [online(1000) for _ in range(11)]
    decode = online(10, DECODING, last_token_s=-0.4)
    plan = scheduler("coserve").plan(snapshot(decode, *prompts), NO_CACHE)
    assert plan.skips_decodes
    assert 0.5 < plan.predicted_s <= 0.7 * 1.1
    overdue = decode._replace(last_token_s=-1.1)
    assert not scheduler("coserve").plan(snapshot(overdue, *prompts), NO_CACHE).skips_decodes


def test_prompts_that_are_late_either_way_do_not_go_first() -> None:
    requests = [*many_decodes(), online(100, arrival_s=-3.0)]
    assert not scheduler("coserve").plan(snapshot(*requests), NO_CACHE).skips_decodes


def test_decodes_run_where_a_late_prompt_finds_no_memory() -> None:
    requests = [online(10, DECODING), online(1000, arrival_s=-3.0)]
    plan = scheduler("coserve").plan(snapshot(*requests, free_kv_tokens=50), NO_CACHE)
    assert not plan.skips_decodes
    assert plan.batch == StepStats.of(decodes=[requests[0].computed_tokens])


def test_without_a_tpot_target_no_decode_waits() -> None:
    requests = [*many_decodes(), online(100, arrival_s=-3.0)]
    core = scheduler("coserve", targets=SloTargets(ttft_s=1.0))
    assert not core.plan(snapshot(*requests), NO_CACHE).skips_decodes


def test_nothing_offline_runs_beside_a_prompt_that_is_cut() -> None:
    requests = (online(state=DECODING), online(5000), offline())
    plan = scheduler("coserve", queued()).plan(snapshot(*requests), NO_CACHE)
    assert plan.pause == rids(requests[2:])
    assert rids(requests[1:2]) == tuple(chunk.rid for chunk in plan.prefills)
    assert plan.budget_s == 0


def test_nothing_offline_delays_a_first_token_that_is_late() -> None:
    requests = (online(50, arrival_s=-3.0), offline())
    plan = scheduler("coserve", queued()).plan(snapshot(*requests), NO_CACHE)
    assert [chunk.rid for chunk in plan.prefills] == [*rids(requests[:1])]
    assert plan.pause == rids(requests[1:])


def test_offline_work_leaves_a_first_token_in_time() -> None:
    """The prompt is due in 80 ms."""
    plan = scheduler("coserve", queued(5000)).plan(snapshot(online(50, arrival_s=-0.92)), NO_CACHE)
    assert len(plan.prefills) == 2
    assert 0.07 < plan.predicted_s <= 0.08


def test_an_iteration_budget_bounds_online_chunks_too() -> None:
    plan = scheduler("coserve", iteration_budget_s=0.03).plan(snapshot(online(5000)), NO_CACHE)
    assert 0.02 < plan.predicted_s <= 0.03


def test_a_margin_is_left_free() -> None:
    plan = scheduler("coserve", margin=0.5).plan(
        snapshot(online(state=DECODING), online(5000, ttft_s=10.0)), NO_CACHE
    )
    assert 0.04 < plan.predicted_s <= 0.05


def test_offline_work_gets_the_part_of_a_gap_that_harm_has_left_it() -> None:
    """The decode is due in 100 ms; late gaps that were not late alone take from that."""
    core = scheduler("coserve", queued(5000), slos=("tbt p99 <= 100ms",))
    seen = snapshot(online(state=DECODING))
    first_s = core.plan(seen, NO_CACHE).predicted_s
    request = online(10)
    core.arrived(request.info)
    for number in range(3):
        core.interference.produced(request.info.rid, 0.2 * number)
    core.interference.advance(MODEL.predict, 1.0)
    harmed_s = core.plan(seen, NO_CACHE).predicted_s
    assert first_s == pytest.approx(0.1, abs=0.001)
    assert harmed_s < 0.97 * first_s


@pytest.mark.parametrize(
    ("slo", "budget_s"), [("tpot p99 <= 100ms", 0.05), ("tbt p99 <= 100ms", 0.1)]
)
def test_what_is_promised_of_the_mean_gap_is_made_up_for(slo: str, budget_s: float) -> None:
    """The only gap so far took 150 ms. The next token is due 200 ms after the first, if the mean
    is to be 100 ms; a gap that is too long stays so."""
    core = scheduler("coserve", queued(5000), slos=(slo,))
    request = online(10, DECODING, generated=2, last_token_s=0.15)
    core.arrived(request.info)
    for at_s in (0.0, 0.15):
        core.interference.produced(request.info.rid, at_s)
    plan = core.plan(snapshot(request, now_s=0.15), NO_CACHE)
    assert plan.budget_s == pytest.approx(budget_s)


def test_a_request_is_held_to_its_own_mean_gap() -> None:
    core = scheduler("coserve", queued(5000), slos=("tbt p99 <= 100ms",))
    request = online(10, DECODING, generated=2, last_token_s=0.1, tpot_s=0.08)
    core.arrived(request.info)
    for at_s in (0.0, 0.1):
        core.interference.produced(request.info.rid, at_s)
    plan = core.plan(snapshot(request, now_s=0.1), NO_CACHE)
    assert plan.budget_s == pytest.approx(0.06)


OVERLOADED = [online(1000, DECODING, tpot_s=0.005) for _ in range(4)]


def test_best_effort_feeds_a_prompt_past_late_decodes() -> None:
    targets = SloTargets(tpot_s=0.1)
    plan = scheduler("coserve", targets=targets, min_online_chunk_tokens=64).plan(
        snapshot(*OVERLOADED, online(500)), NO_CACHE
    )
    assert [chunk.tokens for chunk in plan.prefills] == [64]


def test_without_the_floor_late_decodes_come_first() -> None:
    plan = scheduler("coserve", min_online_chunk_tokens=0).plan(
        snapshot(*OVERLOADED, online(500)), NO_CACHE
    )
    assert not plan.prefills
    assert plan.batch.decode_requests == 4


def test_shedding_refuses_what_cannot_make_it() -> None:
    """A prompt of 5,000 tokens takes 0.5 s; this one has 0.2 s left."""
    hopeless, hopeful = online(5000, arrival_s=-0.8), online(100, arrival_s=-0.5)
    plan = scheduler("coserve", overload=Overload.SHED).plan(snapshot(hopeless, hopeful), NO_CACHE)
    assert plan.shed == rids([hopeless])
    assert [chunk.rid for chunk in plan.prefills] == [*rids([hopeful])]


def test_shedding_spares_requests_that_have_begun() -> None:
    begun = online(5000, PREFILLING, computed=16, arrival_s=-3.0)
    again = online(100, generated=5, arrival_s=-3.0, last_token_s=-2.0)
    plan = scheduler("coserve", overload=Overload.SHED).plan(snapshot(begun, again), NO_CACHE)
    assert not plan.shed


@pytest.mark.parametrize("policy", ["coserve", "conserve", "hygen", "sarathi", "ooco"])
def test_victims_are_parked_then_paused_then_the_last_admitted(policy: str) -> None:
    """The requests hold 300 tokens; a prompt of 250 needs all but the oldest."""
    requests = [
        offline(100, DECODING, computed=100),
        offline(100, PAUSED, computed=100),
        offline(100, PARKED, computed=100, generated=0),
    ]
    victims = []
    for prompt_tokens in (80, 180, 280):
        plan = scheduler(policy).plan(
            snapshot(*requests, online(prompt_tokens), free_kv_tokens=0), NO_CACHE
        )
        victims.append(tuple(retraction.rid for retraction in plan.retract))
    oldest, paused, parked = rids(requests)
    assert victims == [(parked,), (parked, paused), (parked, paused, oldest)]


def test_a_victim_gives_up_its_tail_only() -> None:
    request = offline(1000, PARKED, computed=1000, generated=0)
    plan = scheduler("coserve").plan(
        snapshot(request, online(100), free_kv_tokens=0, page_tokens=10), NO_CACHE
    )
    assert plan.retract == ((request.info.rid, 100),)


def test_what_others_share_frees_nothing() -> None:
    shared = offline(100, PARKED, computed=100, generated=0, cached=90)
    own = offline(100, PARKED, computed=100, generated=0)
    plan = scheduler("coserve").plan(snapshot(own, shared, online(100), free_kv_tokens=0), NO_CACHE)
    assert plan.retract == ((shared.info.rid, 100), (own.info.rid, 90))


def test_nobody_is_retracted_in_vain() -> None:
    """The prompt needs more than all offline requests hold."""
    requests = (online(1000, DECODING), offline(100))
    plan = scheduler("coserve", queued()).plan(
        snapshot(*requests, online(500), free_kv_tokens=50), NO_CACHE
    )
    assert not plan.retract
    assert not plan.prefills, "nor does anything new take the KV it waits for"
    assert plan.batch.decode_requests == 2


def test_a_request_slot_is_taken_from_the_last_admitted() -> None:
    requests = (offline(), offline())
    plan = scheduler("coserve").plan(snapshot(*requests, online(), free_slots=0), NO_CACHE)
    assert [retraction.rid for retraction in plan.retract] == [*rids(requests[1:])]


def test_requests_that_cannot_pause_are_victims_as_any_other() -> None:
    requests = (offline(), offline(can_pause=False))
    plan = scheduler("coserve").plan(snapshot(*requests, online(), free_slots=0), NO_CACHE)
    assert [retraction.rid for retraction in plan.retract] == [*rids(requests[1:])]


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"fcfs"}))
def test_no_online_request_loses_memory_to_an_offline_one_that_cannot_pause(policy: str) -> None:
    """Each of the decodes opens a page, and there is none."""
    requests = (online(16, DECODING, computed=16), offline(16, computed=16, can_pause=False))
    plan = scheduler(policy).plan(snapshot(*requests, free_kv_tokens=0, page_tokens=16), NO_CACHE)
    assert [retraction.rid for retraction in plan.retract] == [*rids(requests[1:])]
    assert plan.batch.decode_requests == 1


def test_online_decodes_out_of_kv_retract_the_last() -> None:
    requests = (online(state=DECODING), online(state=DECODING), offline())
    plan = scheduler("coserve").plan(snapshot(*requests, free_kv_tokens=0), NO_CACHE)
    assert [retraction.rid for retraction in plan.retract] == [requests[2].info.rid]
    plan = scheduler("coserve").plan(snapshot(*requests[:2], free_kv_tokens=0), NO_CACHE)
    assert [retraction.rid for retraction in plan.retract] == [requests[1].info.rid]
    assert plan.batch.decode_requests == 1


@pytest.mark.parametrize("last_token_s", [0.0, None])
def test_a_first_token_in_flight_is_not_overdue(last_token_s: float | None) -> None:
    """Its request arrived 0.6 s ago, and may get a token every 0.1 s."""
    targets = SloTargets(ttft_s=1.0, tpot_s=0.1)
    first = online(500, DECODING, arrival_s=-0.6)._replace(last_token_s=last_token_s)
    plan = scheduler("coserve", queued(50, rid="q"), targets=targets).plan(
        snapshot(first), NO_CACHE
    )
    assert [chunk.rid for chunk in plan.prefills] == ["q"]
    assert plan.budget_s == pytest.approx(0.1)
    prompt = online(50, arrival_s=-0.05)
    plan = scheduler("coserve", targets=targets).plan(snapshot(first, prompt), NO_CACHE)
    assert not plan.skips_decodes
