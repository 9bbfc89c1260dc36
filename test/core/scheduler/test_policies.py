"""What each policy does that the others do not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from core.scheduler.policy_exceptions import RUNS_NO_OFFLINE, all_but
from core.scheduler.scenarios import (
    MODEL,
    NO_CACHE,
    decoded_for,
    offline,
    online,
    queued,
    ran,
    rids,
    scheduler,
    snapshot,
)
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.planning.offline_phase import decode_offline, prefill_offline
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.policies.baselines import FcfsPolicy, SarathiPolicy
from sglang_coserve.core.policies.bros import BrosPolicy
from sglang_coserve.core.policies.hygen import HygenPolicy
from sglang_coserve.core.policies.ooco import OocoPolicy, Role
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import Request
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import SloTargets

DECODING, PAUSED = RequestState.DECODING, RequestState.PAUSED
PARKED, PREFILLING = RequestState.PARKED, RequestState.PREFILLING


def test_an_unknown_policy_is_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"'random'.*coserve, conserve"):
        make_policy("random")


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        ("bros", {"utility_ratio": 0.5}, "bros: utility_ratio is no .* has only base_batch_requ"),
        ("conserve", {"random_picks": 1}, "conserve: random_picks is no .* has no settings"),
        ("bros", {"_batch_requests": 1}, "bros: _batch_requests is no setting"),
        ("hygen", {"step_prefill_tokens": 0}, "hygen: step_prefill_tokens must be greater"),
        ("coserve", {"utility_ratio": 1.5}, "coserve: utility_ratio must be less"),
    ],
)
def test_a_setting_that_the_policy_lacks_or_out_of_range_is_named(
    policy: str, settings: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(policy, settings)


class TestConserve:
    def test_one_tbt_bounds_the_batch_whatever_the_slack(self) -> None:
        """The decode's token is late; coserve would stop here, t_TBT does not know."""
        decode = online(state=DECODING, last_token_s=-0.09)
        plan = scheduler("conserve", queued(5000)).plan(snapshot(decode), NO_CACHE)
        assert 0.09 < plan.predicted_s <= 0.1

    def test_an_idle_engine_ignores_who_may_arrive(self) -> None:
        plan = scheduler("conserve", queued(8000)).plan(snapshot(), NO_CACHE)
        assert plan.budget_s == math.inf


class TestHygen:
    def test_the_latency_budget_holds_without_online_traffic_too(self) -> None:
        plan = scheduler("hygen", queued(5000), iteration_budget_s=0.03).plan(snapshot(), NO_CACHE)
        assert 0.02 < plan.predicted_s <= 0.03

    def test_both_phases_share_the_chunk(self) -> None:
        prompt = online(100)
        plan = scheduler(HygenPolicy(step_prefill_tokens=128), queued(500, rid="q")).plan(
            snapshot(prompt), NO_CACHE
        )
        assert [tuple(chunk) for chunk in plan.prefills] == [(prompt.info.rid, 100), ("q", 28)]

    def test_offline_decodes_do_not_lengthen_the_chunk(self) -> None:
        decodes = [offline(10) for _ in range(200)]
        plan = scheduler(HygenPolicy(step_prefill_tokens=128)).plan(
            snapshot(online(500), *decodes), NO_CACHE
        )
        assert [chunk.tokens for chunk in plan.prefills] == [128]

    def test_the_tpot_target_is_the_budget_without_a_search(self) -> None:
        plan = scheduler(HygenPolicy(step_prefill_tokens=8192), queued(5000)).plan(
            snapshot(online(state=DECODING)), NO_CACHE
        )
        assert 0.09 < plan.predicted_s <= 0.1

    def test_offline_requests_come_in_prefix_order(self) -> None:
        """HyGen §4.3's example: what shares a prefix is served together."""
        waiting = [
            queued(10, rid="ml", first=0),
            queued(10, rid="code", first=100),
            queued(12, rid="ai", first=0),
        ]
        plan = scheduler(HygenPolicy(utility_ratio=1.0), *waiting).plan(snapshot(), NO_CACHE)
        assert [chunk.rid for chunk in plan.prefills] == ["ml", "ai", "code"]
        plan = scheduler("conserve", *waiting).plan(snapshot(), NO_CACHE)
        assert [chunk.rid for chunk in plan.prefills] == ["ml", "code", "ai"]


class TestBros:
    def test_an_urgent_prompt_goes_before_decodes_with_time(self) -> None:
        """The prompt is due in 60 ms and takes 55; the decodes have 100 ms."""
        decodes = [online(30_000, DECODING) for _ in range(5)]
        prompt = online(450, arrival_s=-0.94)
        plan = scheduler("bros").plan(snapshot(*decodes, prompt), NO_CACHE)
        assert [chunk.rid for chunk in plan.prefills] == [prompt.info.rid]
        assert 0 < len(plan.pause) < 5
        assert plan.predicted_s <= 0.06

    def test_who_is_replaced_is_in_time_one_average_step_after_the_whole_of_this_one(self) -> None:
        """It has 120 ms, and the average step takes 50."""
        brain = scheduler(BrosPolicy(base_batch_requests=1))
        seen = snapshot(online(100))
        ran(brain, brain.plan(seen, NO_CACHE), seen, seconds=0.05)
        urgent, relaxed = online(100, DECODING), online(100, DECODING, tpot_s=0.12)
        prompt = offline(5000, PREFILLING, computed=100, generated=0)
        plan = brain.plan(snapshot(urgent, relaxed, prompt), NO_CACHE)
        assert plan.pause == rids([relaxed])
        assert plan.predicted_s + 0.05 <= 0.12

    def test_an_offline_request_replaces_the_least_urgent(self) -> None:
        """The relaxed one is due much later, and does not fit together with the offline one."""
        urgent = online(100, arrival_s=-0.95)
        relaxed = online(250, arrival_s=-0.1)
        request = offline(100)
        plan = scheduler("bros").plan(snapshot(urgent, relaxed, request), NO_CACHE)
        assert [chunk.rid for chunk in plan.prefills] == [urgent.info.rid, relaxed.info.rid]
        assert plan.batch.decode_requests == 1
        tight = scheduler(BrosPolicy(base_batch_requests=2)).plan(
            snapshot(urgent, relaxed, request), NO_CACHE
        )
        assert [chunk.rid for chunk in tight.prefills] == [urgent.info.rid]
        assert tight.batch.decode_requests == 1

    def test_no_online_request_is_replaced_that_cannot_wait(self) -> None:
        """It has 60 ms left; this step takes 30 and the average one 50."""
        brain = scheduler(BrosPolicy(base_batch_requests=1))
        seen = snapshot(online(100))
        ran(brain, brain.plan(seen, NO_CACHE), seen, seconds=0.05)
        prompts = (online(100, arrival_s=-0.95), online(100, arrival_s=-0.94))
        plan = brain.plan(snapshot(*prompts, offline(5000)), NO_CACHE)
        assert {chunk.rid for chunk in plan.prefills} == {*rids(prompts)}

    def test_the_batch_grows_until_a_deadline_binds(self) -> None:
        brain = scheduler(BrosPolicy(base_batch_requests=1))
        requests = [online(10, DECODING) for _ in range(8)]
        sizes = []
        for _ in range(4):
            seen = snapshot(*requests)
            plan = brain.plan(seen, NO_CACHE)
            ran(brain, plan, seen)
            sizes.append(plan.batch.decode_requests)
        assert sizes == [1, 2, 4, 8]
        # Each of them has 12 ms left, and eight decodes of 10,000 tokens take longer.
        tight = [online(10_000, DECODING, last_token_s=-0.088) for _ in range(8)]
        seen = snapshot(*tight)
        ran(brain, brain.plan(seen, NO_CACHE), seen)
        assert brain.plan(snapshot(*requests), NO_CACHE).batch.decode_requests == 1

    def test_a_lost_deadline_stops_nobody(self) -> None:
        requests = (
            online(100, arrival_s=-9.0),
            online(100, arrival_s=-9.0),
            online(state=DECODING),
        )
        plan = scheduler("bros").plan(snapshot(*requests), NO_CACHE)
        assert plan.batch.prefill_requests + plan.batch.decode_requests == 3


class TestOoco:
    MEMORY_BOUND = MODEL
    COMPUTE_BOUND = PolynomialModel.of(compute_token_s=1e-2, iteration_s=1e-3)

    @pytest.mark.parametrize(
        ("model", "victim"), [(MEMORY_BOUND, "short"), (COMPUTE_BOUND, "long")]
    )
    def test_the_bottleneck_picks_the_victim(self, model: PolynomialModel, victim: str) -> None:
        requests = (offline(900, rid="long"), offline(100, rid="short"))
        plan = scheduler("ooco", model=model, targets=SloTargets()).plan(
            snapshot(*requests, online(20), free_slots=0), NO_CACHE
        )
        assert [retraction.rid for retraction in plan.retract] == [victim]

    def test_the_shortest_fill_the_batch_after_the_random_ones(self) -> None:
        """Without draws the short ones run, wherever they stand."""
        long = [offline(100_000) for _ in range(8)]
        short = [offline(100) for _ in range(8)]
        plan = scheduler(OocoPolicy(random_picks=0)).plan(
            snapshot(online(10, DECODING), *long, *short), NO_CACHE
        )
        assert not {*plan.pause} & {*rids(short)}
        assert {*plan.pause} < {*rids(long)}

    @pytest.mark.parametrize("random_picks", [0, 4, 40])
    def test_decodes_that_cannot_pause_run_first(self, random_picks: int) -> None:
        """They would be retracted if they were left out."""
        policy, targets = OocoPolicy(random_picks=random_picks), SloTargets(1.0, 0.0106)
        fixed = offline(500, DECODING, can_pause=False)
        for seed in range(20):
            others = [offline(300, DECODING) for _ in range(9)]
            view = snapshot(online(10, DECODING), *others[:5], fixed, *others[5:])
            plan = scheduler(policy, seed=seed, targets=targets).plan(view, NO_CACHE)
            assert plan.pause
            assert not plan.retract

    def test_draws_let_long_ones_run_too(self) -> None:
        """One of each step's draws: in the end every long decode has run."""
        requests = [offline(400_000) for _ in range(4)] + [offline(100) for _ in range(400)]
        brain = scheduler(OocoPolicy(random_picks=40))
        seen: set[str] = set()
        for _ in range(60):
            view = snapshot(online(10, DECODING), *requests)
            plan = brain.plan(view, NO_CACHE)
            ran(brain, plan, view)
            seen |= {*rids(requests[:4])} - {*plan.pause}
        assert seen == {*rids(requests[:4])}

    def test_a_prefill_that_retraction_would_waste_is_not_begun(self) -> None:
        """Ten compute-bound decodes gain little from one more, and admissions were retracted."""
        requests = [offline(100) for _ in range(10)]
        brain = scheduler("ooco", queued(4000, rid="new"), model=self.COMPUTE_BOUND)
        idle = snapshot(*requests)
        assert [chunk.rid for chunk in brain.plan(idle, NO_CACHE).prefills] == ["new"]
        for _ in range(100):
            ran(brain, brain.plan(idle, NO_CACHE), idle)
            if brain.queue.is_running("new"):
                brain.restore("new", 0)
        assert not brain.plan(idle, NO_CACHE).prefills

    def test_a_strict_instance_only_decodes(self) -> None:
        plan = scheduler(OocoPolicy(role=Role.STRICT), queued()).plan(
            snapshot(online(100), offline()), NO_CACHE
        )
        assert not plan.prefills
        assert plan.batch.decode_requests == 1

    def test_an_online_prompt_has_a_relaxed_instance_to_itself(self) -> None:
        policy = OocoPolicy(role=Role.RELAXED)
        request, prompt = offline(), online(5000)
        plan = scheduler(policy, queued()).plan(snapshot(request, prompt), NO_CACHE)
        assert [tuple(chunk) for chunk in plan.prefills] == [(prompt.info.rid, 5000)]
        assert plan.pause == rids([request])


class TestBaselines:
    def test_fcfs_serves_whoever_came_first(self) -> None:
        waiting = [queued(50, rid="first", arrival_s=1.0), queued(50, rid="third", arrival_s=3.0)]
        second = online(50, rid="second", arrival_s=2.0)
        plan = scheduler("fcfs", *waiting).plan(snapshot(second), NO_CACHE)
        assert [chunk.rid for chunk in plan.prefills] == ["first", "second", "third"]

    def test_fcfs_lets_an_offline_prompt_block_an_online_one(self) -> None:
        early = queued(500, rid="early", arrival_s=-1.0)
        plan = scheduler(FcfsPolicy(chunk_tokens=256), early).plan(snapshot(online(50)), NO_CACHE)
        assert [tuple(chunk) for chunk in plan.prefills] == [("early", 256)]

    def test_sarathi_fills_a_fixed_number_of_tokens(self) -> None:
        """Whatever the context makes of their latency."""
        for tokens in (10, 400_000):
            plan = scheduler(SarathiPolicy(chunk_tokens=512), queued(5000)).plan(
                snapshot(online(tokens, DECODING), free_kv_tokens=10_000), NO_CACHE
            )
            assert plan.batch.compute_tokens == 512

    def test_sarathi_stalls_no_decode_for_a_prompt(self) -> None:
        plan = scheduler(SarathiPolicy(chunk_tokens=512)).plan(
            snapshot(offline(), online(5000)), NO_CACHE
        )
        assert plan.batch.decode_requests == 1
        assert plan.batch.compute_tokens == 512

    def test_priority_retracts_the_last_admitted_whatever_its_state(self) -> None:
        requests = (offline(100, PARKED, computed=50, generated=0), offline(100, DECODING))
        plan = scheduler("priority").plan(snapshot(*requests, online(), free_slots=0), NO_CACHE)
        assert [retraction.rid for retraction in plan.retract] == [*rids(requests[1:])]

    def test_non_preemptive_lets_an_online_prompt_wait_for_memory(self) -> None:
        requests = (offline(100), online(500))
        plan = scheduler("non_preemptive").plan(snapshot(*requests, free_kv_tokens=450), NO_CACHE)
        assert not plan.retract
        assert not plan.prefills
        assert plan.batch.decode_requests == 1

    def test_online_only_runs_nothing_offline(self) -> None:
        plan = scheduler("online_only", queued()).plan(snapshot(offline(), online(5000)), NO_CACHE)
        assert plan.batch.decode_requests == 0
        assert [chunk.tokens for chunk in plan.prefills] == [2048]


# --- A policy of one's own ----------------------------------------------------------------


@dataclass
class LatestDeadline(Policy):
    """Runs the offline decodes with the latest deadlines, and only so many."""

    name: ClassVar[str] = "latest_deadline"
    most_decodes: int = 2

    def compose(self, batch: StepBuilder) -> None:
        queue = batch.context.queue

        def key(request: Request) -> tuple[bool, float]:
            deadline_s = queue.running(request.info.rid).deadline_s
            return request.info.can_pause, math.inf if deadline_s is None else -deadline_s

        latest = sorted(batch.offline_decodes, key=key)
        decode_offline(batch, latest[: self.most_decodes])
        prefill_offline(batch)


def test_a_policy_may_choose_among_decodes_by_what_the_queue_knows_of_them() -> None:
    """As CONTRIBUTING.md has it: a decode that cannot pause goes first."""
    waiting = [queued(rid=f"due at {at_s}", deadline_s=at_s) for at_s in (20.0, 30.0, 10.0)]
    brain = scheduler(LatestDeadline(), *waiting)
    begun = [offline(rid=one.rid) for one in waiting]
    plan = brain.plan(snapshot(*begun), NO_CACHE)
    assert plan.pause == ("due at 10.0",)
    fixed = offline(rid="fixed", can_pause=False)
    plan = brain.plan(snapshot(*begun, fixed), NO_CACHE)
    assert plan.pause == ("due at 20.0", "due at 10.0")
    assert not plan.retract


# --- Deadlines of offline requests --------------------------------------------------------


@pytest.mark.parametrize("policy", all_but(RUNS_NO_OFFLINE))
def test_a_request_whose_deadline_is_at_risk_is_first(policy: str) -> None:
    older = [queued(100, arrival_s=float(number)) for number in range(3)]
    due = queued(100, rid="due", arrival_s=5.0, deadline_s=20.0)
    brain = scheduler(policy, *older, due)
    plan = brain.plan(snapshot(now_s=10.0, free_slots=1), NO_CACHE)
    assert [chunk.rid for chunk in plan.prefills] == ["due"]


def test_urgency_begins_at_the_latest_start() -> None:
    """Both are due at the same time; one of them has twice as much to generate."""
    short = queued(100, rid="short", deadline_s=1000.0)
    long = queued(100, rid="long", arrival_s=5.0, deadline_s=1000.0)
    long = replace(long, max_new_tokens=128)
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
