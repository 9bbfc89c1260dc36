"""Online work comes first, in order, and as much of it as the deadlines allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.scheduler.policy_exceptions import IGNORES_CLASSES, KEEPS_OFFLINE_KV, all_but
from core.scheduler.scenarios import (
    MODEL,
    NO_CACHE,
    offline,
    online,
    queued,
    ran,
    rids,
    scheduler,
    snapshot,
)
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.metrics import SloTargets

DECODING, PAUSED = RequestState.DECODING, RequestState.PAUSED
PARKED, PREFILLING = RequestState.PARKED, RequestState.PREFILLING


def test_the_unfinished_prompt_goes_on_before_others_in_order_of_arrival() -> None:
    first, second, begun = online(50), online(60), online(50, PREFILLING, computed=16)
    plan = scheduler("coserve").plan(snapshot(first, second, begun), NO_CACHE)
    assert [tuple(chunk) for chunk in plan.prefills] == [
        (begun.info.rid, 34),
        (first.info.rid, 50),
        (second.info.rid, 60),
    ]


def test_a_chunk_is_as_long_as_the_decodes_allow() -> None:
    """The prompt would take 510 ms, more than half its target, and is in time all the same."""
    decode, prompt = online(state=DECODING), online(5000)
    plan = scheduler("coserve").plan(snapshot(decode, prompt), NO_CACHE)
    assert not plan.skips_decodes
    (chunk,) = plan.prefills
    decodes = StepStats().with_decode(decode.computed_tokens)
    assert plan.predicted_s <= 0.1
    assert MODEL.predict(decodes.with_prefill(chunk.tokens + 1, 0)) > 0.1


def test_a_late_token_shortens_the_chunk() -> None:
    """The decode's last token is 60 ms old, so 40 ms are left of its 100 ms."""
    decode, prompt = online(state=DECODING, last_token_s=-0.06), online(5000)
    plan = scheduler("coserve").plan(snapshot(decode, prompt), NO_CACHE)
    assert 0.03 < plan.predicted_s <= 0.04


def many_decodes(count: int = 100, **fields: object) -> list[Request]:
    """Take 20 ms a step, of which 10 ms are for them."""
    return [online(10, DECODING, **fields) for _ in range(count)]  # type: ignore[arg-type]


# --- Prompts before decodes, or beside them ---------------------------------------------------


@pytest.mark.parametrize(("mixes_decodes", "decodes"), [(False, 0), (True, 100)])
def test_without_offline_work_and_targets_of_its_own_the_order_is_that_of_plain_sglang(
    mixes_decodes: bool, decodes: int
) -> None:
    """Whole prompts, up to SGLang's chunk; decodes beside them only where SGLang mixes them."""
    prompts = [online(3000), online(3000)]
    core = scheduler(
        "coserve",
        slos=("ttft p99 <= +10%", "tbt p99 <= +10%"),
        engine=EngineSize(mixes_decodes=mixes_decodes),
    )
    plan = core.plan(snapshot(*many_decodes(), *prompts, max_batch_tokens=8192), NO_CACHE)
    assert [chunk.tokens for chunk in plan.prefills] == [3000, 3000]
    assert plan.batch.decode_requests == decodes
    assert plan.skips_decodes is not mixes_decodes


@pytest.mark.parametrize(("more_s", "goes_first"), [(0.011, False), (0.009, True)])
def test_prompts_are_mixed_with_decodes_as_far_as_that_delays_them_by_what_may_be_added(
    more_s: float, goes_first: bool
) -> None:
    """The prompt takes 20 ms alone, 30 beside the decodes, which are due in 35."""
    prior_s = MODEL.predict(StepStats.of([(1, 0)]))
    targets = SloTargets(ttft_s=prior_s + more_s, tpot_s=0.1)
    requests = [*many_decodes(last_token_s=-0.065), online(100)]
    plan = scheduler("coserve", queued(), targets=targets).plan(snapshot(*requests), NO_CACHE)
    assert plan.skips_decodes == goes_first
    assert plan.batch.decode_requests == (0 if goes_first else 100)
    assert not plan.pause
    assert plan.budget_s == 0 or not goes_first


def test_what_was_added_to_waiting_prompts_is_added_once() -> None:
    """The step before took 80 ms for offline work; a prompt of 20 ms, due in 25, came meanwhile."""
    targets = SloTargets(ttft_s=0.1, tpot_s=0.1)
    requests = [*many_decodes(last_token_s=-0.065), online(100, arrival_s=-0.075)]
    for had_offline in (False, True):
        core = scheduler("coserve", *([queued(8000)] if had_offline else []), targets=targets)
        before = snapshot(online(10, DECODING))
        ran(core, core.plan(before, NO_CACHE), before)
        assert core.plan(snapshot(*requests), NO_CACHE).skips_decodes is had_offline


def test_decodes_that_are_due_let_prompts_go_first() -> None:
    """Not even one token fits into the 5 ms that they have."""
    due = many_decodes(last_token_s=-0.095)
    plan = scheduler("coserve").plan(snapshot(*due, online(100)), NO_CACHE)
    assert plan.skips_decodes


@pytest.mark.parametrize("arrival_s", [0.0, -3.0])
def test_decodes_that_can_wait_let_prompts_go_first(arrival_s: float) -> None:
    requests = [*many_decodes(), online(100, arrival_s=arrival_s)]
    assert scheduler("coserve").plan(snapshot(*requests), NO_CACHE).skips_decodes


def test_decodes_do_not_wait_for_a_second_step_of_prompts_beside_the_first() -> None:
    """Under overlap scheduling the second may be planned before the first, of 60 ms, has ended."""
    decodes = many_decodes(10)
    core = scheduler("coserve")
    first = core.plan(snapshot(*decodes, online(600)), NO_CACHE)
    assert first.skips_decodes
    seen = snapshot(*decodes, online(300))
    assert core.plan(seen, NO_CACHE).skips_decodes
    assert not core.plan(replace(seen, ahead_s=first.predicted_s), NO_CACHE).skips_decodes


def test_a_token_in_flight_comes_out_when_its_step_ends() -> None:
    decodes = [one._replace(last_token_s=None, first_token_s=None) for one in many_decodes(10)]
    seen = replace(snapshot(*decodes, online(600)), ahead_s=0.06)
    assert scheduler("coserve").plan(seen, NO_CACHE).skips_decodes


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


@pytest.mark.parametrize("policy", all_but(KEEPS_OFFLINE_KV))
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


@pytest.mark.parametrize(("prompt_tokens", "joins"), [(600, True), (1200, False)])
def test_offline_work_gives_way_where_more_online_decodes_than_alone_crowd_the_kv(
    prompt_tokens: int, joins: bool
) -> None:
    """Ten of them have 6,000 or 12,000 of 16,000 or 22,000 tokens."""
    requests = [online(prompt_tokens, DECODING) for _ in range(10)]
    seen = snapshot(*requests, free_kv_tokens=10_000)
    brain = scheduler("coserve", queued())
    plan = brain.plan(seen, NO_CACHE)
    assert bool(plan.prefills) is joins
    assert plan.batch.decode_requests == 10

    for request in requests:
        brain.arrived(request.info)
    ran(brain, plan, seen)
    now_s = 2.0  # The baseline has computed their prompts by then.
    later = [one._replace(last_token_s=now_s, first_token_s=now_s) for one in requests]
    seen = replace(seen, admitted=later, now_s=now_s)
    ran(brain, brain.plan(seen, NO_CACHE), seen)
    brain.add_offline(queued())
    assert brain.plan(seen, NO_CACHE).prefills, "alone as many would decode"


def test_nobody_is_retracted_in_vain() -> None:
    """The prompt needs more than all offline requests hold."""
    requests = (online(100, DECODING), offline(100))
    plan = scheduler("coserve", queued()).plan(
        snapshot(*requests, online(500), free_kv_tokens=50), NO_CACHE
    )
    assert not plan.retract
    assert not plan.prefills, "nor does anything new take the KV it waits for"
    assert plan.batch.decode_requests == 2


@pytest.mark.parametrize("policy", all_but(IGNORES_CLASSES))
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
    times_s = {"last_token_s": last_token_s, "first_token_s": last_token_s}
    first = online(500, DECODING, arrival_s=-0.6)._replace(**times_s)
    plan = scheduler("coserve", queued(50, rid="q"), targets=targets).plan(
        snapshot(first), NO_CACHE
    )
    assert [chunk.rid for chunk in plan.prefills] == ["q"]
    assert plan.budget_s == pytest.approx(0.1)
    prompt = online(1000, arrival_s=-0.05)  # It takes longer than the first can wait.
    plan = scheduler("coserve", targets=targets).plan(snapshot(first, prompt), NO_CACHE)
    assert not plan.skips_decodes


def test_a_piece_of_a_prompt_fits_beside_streams_whose_first_tokens_are_fast() -> None:
    # A first token takes 11 ms alone, so +10% lets a step grow by 2.7 ms: 27 tokens.
    brain = scheduler(
        "coserve", queued(500), slos=["ttft p99 <= +10%"], stream_slowdown=1.0, min_chunk_tokens=32
    )
    seen = snapshot(*(online(10, DECODING) for _ in range(4)))
    plan = brain.plan(seen, NO_CACHE)
    assert [chunk.tokens for chunk in plan.prefills] == [40]
