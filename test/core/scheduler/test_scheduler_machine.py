"""Every policy on a simulated engine, under arbitrary traffic; each plan is checked on the way."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.scheduler import scenarios
from core.scheduler.policy_exceptions import HOLDS_ONLINE_BACK, RUNS_ALL_DECODES, RUNS_NO_OFFLINE
from core.scheduler.scenarios import MODEL
from sglang_coserve.core.control.slo import deadlines
from sglang_coserve.core.offline_queue import pack_tokens
from sglang_coserve.core.policies import POLICIES, make_policy
from sglang_coserve.core.request import Ending, RequestClass, RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import Overload, SchedulerConfig
from sglang_coserve.core.snapshot import ChunkRules, EngineSnapshot, PrefixCache, RequestInfo
from sglang_coserve.core.step import Lane, Retraction, StepPlan
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.executor_config import ExecutorConfig, SafepointConfig
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.running_step import RunningStep
from simulator.engines import check_executor

slo_targets = st.builds(
    SloTargets,
    ttft_s=st.sampled_from([None, 0.05, 0.5]),
    tpot_s=st.sampled_from([None, 0.005, 0.02, 0.05]),
)
configs = st.builds(
    SchedulerConfig,
    iteration_budget_s=st.sampled_from([None, 0.015]),
    overload=st.sampled_from(Overload),
    headroom_tokens=st.sampled_from([0, 8]),
    max_picks=st.sampled_from([1, 64]),
)
machines = st.builds(
    ExecutorConfig,
    kv_capacity_tokens=st.just(480),
    page_tokens=st.sampled_from([1, 16]),
    max_running_requests=st.sampled_from([2, 16]),
    max_batch_tokens=st.sampled_from([48, 512]),
    chunk_rules=st.sampled_from(
        [ChunkRules(), ChunkRules(align_tokens=24), ChunkRules(may_cut=False)]
    ),
    safepoint=st.sampled_from([None, SafepointConfig(8, 2, 0.0)]),
    overlap=st.booleans(),
    noise_cv=st.sampled_from([0.0, 0.3]),
)


class Checked(Scheduler):
    """Checks each plan against the snapshot that it was made from."""

    def plan(self, snapshot: EngineSnapshot, cache: PrefixCache) -> StepPlan:
        plan = super().plan(snapshot, cache)
        assert plan == super().plan(snapshot, cache), "plan changed something"
        if plan.resumes:
            assert (plan.step, plan.batch) == (snapshot.suspended.step, snapshot.suspended.batch)
        elif not plan.drops:
            check_contract(plan, snapshot)
            check_online_first(plan, snapshot, self._policy.name)
        return plan


def check_contract(plan: StepPlan, seen: EngineSnapshot) -> None:
    """What the engine itself does not notice; it asserts the batch, the states and the KV."""
    requests = {request.info.rid: request for request in (*seen.admitted, *seen.waiting)}
    assert plan.predicted_s == MODEL.predict(plan.batch)
    assert plan.prefills or plan.is_idle or not plan.skips_decodes, "a step for nobody"
    decodes = plan.batch.decode_requests
    most_tokens = max(seen.max_batch_tokens, decodes)
    if not seen.chunk_rules.may_cut and len(plan.prefills) == 1:
        most_tokens = max(most_tokens, plan.batch.compute_tokens)
    assert plan.batch.compute_tokens <= most_tokens
    assert all(0 < tokens <= requests[rid].computed_tokens for rid, tokens in plan.retract)
    # Of a batch without online requests all are moved at once.
    decoding = [one for one in seen.admitted if one.state is RequestState.DECODING]
    is_whole = plan.lane is Lane.OFFLINE and not any(one.info.is_online for one in decoding)
    assert all(requests[rid].info.can_pause or is_whole for rid in plan.pause)
    if plan.lane is Lane.OFFLINE:
        assert seen.stop_share < 1 and seen.suspended is None
        assert not any(rid in requests and requests[rid].info.is_online for rid, _ in plan.prefills)


def check_online_first(plan: StepPlan, seen: EngineSnapshot, policy: str) -> None:
    """No offline work runs while an online request could have used its place."""
    chunks, retracted = dict(plan.prefills), dict(plan.retract)
    online = [one for one in (*seen.admitted, *seen.waiting) if one.info.is_online]
    offline = [one for one in seen.admitted if not one.info.is_online]
    decoding = set()
    if plan.lane is Lane.SHARED and not plan.skips_decodes:
        decoding = {one.info.rid for one in offline if one.state is RequestState.DECODING}
        resumed = {*plan.resume} & {one.info.rid for one in offline}  # Online decodes resume, too.
        decoding = (decoding | resumed) - {*plan.pause, *retracted}
    prefilling = chunks.keys() - {one.info.rid for one in online}
    runs_all = policy in RUNS_ALL_DECODES
    if not runs_all and (prefilling or decoding):
        assert plan.predicted_s <= plan.budget_s
    if policy in HOLDS_ONLINE_BACK or not (prefilling or (decoding and not runs_all)):
        return

    def paged(tokens: int) -> int:
        return -(-tokens // seen.page_tokens) * seen.page_tokens

    own_kv = sum(paged(one.computed_tokens) - paged(one.cached_tokens) for one in offline)
    reachable_kv = seen.free_kv_tokens + seen.evictable_kv_tokens + own_kv
    slots = seen.free_slots + len(offline)
    for request in online:
        rid = request.info.rid
        if rid in plan.shed or rid in retracted:
            continue
        if request.state in (RequestState.DECODING, RequestState.PAUSED):
            assert rid not in plan.pause
        elif rid in chunks:
            assert chunks[rid] == request.tokens_to_compute, "cut, and offline work runs"
        else:
            online_kv = sum(paged(chunks[one.info.rid]) for one in online if one.info.rid in chunks)
            needed = paged(request.length_tokens) + online_kv + 200
            needed += plan.batch.decode_requests * seen.page_tokens
            assert needed > reachable_kv or slots <= len(chunks), "left waiting, and offline runs"


class Arrivals:
    """A source of traffic to which requests are added while it is used."""

    def __init__(self) -> None:
        self.coming: list[SimRequest] = []

    @property
    def next_arrival_s(self) -> float:
        return self.coming[0].info.arrival_s if self.coming else math.inf

    def arrived(self, until_s: float) -> Iterator[SimRequest]:
        while self.next_arrival_s <= until_s:
            yield self.coming.pop(0)

    def refill(self, num_waiting: int, now_s: float) -> tuple[SimRequest, ...]:
        return ()


class PartialEngine(SimEngine):
    """An engine that may admit only the first of the planned prefills."""

    admits: int | None = None

    def _begin(self, plan: StepPlan) -> RunningStep:
        count = len(plan.prefills) if self.admits is None else self.admits
        chunks, left_out = plan.prefills[:count], plan.prefills[count:]
        executor = self.executor
        unplanned = StepStats.of((tokens, self._context(rid)) for rid, tokens in left_out)
        batch = StepStats(
            *(all_of - its for all_of, its in zip(plan.batch, unplanned, strict=True))
        )
        begun = [rid for rid, _ in left_out if rid in executor.admitted]
        park = [rid for rid in begun if executor.admitted[rid].state is RequestState.PREFILLING]
        if not plan.is_idle:
            self._scheduler.start(plan, chunks)
        admitted = replace(plan, prefills=chunks, batch=batch, park=(*plan.park, *park))
        step = executor.begin(admitted, self.now_s)
        self._report_changes(plan, step)
        return step

    def _run(self, plan: StepPlan, batch: RunningStep) -> None:
        # A step without any request takes no time, so no arrival can suspend it.
        lane = Lane.SHARED if batch.plan.is_idle else plan.lane
        super()._run(replace(plan, lane=lane), batch)

    def _context(self, rid: str) -> int:
        executor = self.executor
        if rid in executor.admitted:
            return executor.admitted[rid].computed_tokens
        waiting = {one.info.rid: one.view for one in executor.waiting}
        cached = waiting[rid].cached_tokens if rid in waiting else executor.cached_tokens(rid)
        assert cached is not None
        return cached


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive, steps run, requests are aborted; in the end all have ended."""

    policy = "conserve"

    @initialize(config=configs, slo=slo_targets, machine=machines)
    def start(self, config: SchedulerConfig, slo: SloTargets, machine: ExecutorConfig) -> None:
        self.scheduler = self.scheduler_of(config, slo)
        self.executor = SimulatedExecutor(machine, MODEL)
        self.source = Arrivals()
        self.engine = PartialEngine(self.scheduler, self.executor, self.source)  # type: ignore[arg-type]
        self.num_arrivals = 0

    def scheduler_of(self, config: SchedulerConfig, slo: SloTargets) -> Scheduler:
        return Checked(make_policy(self.policy), MODEL, deadlines(slo), config)

    @rule(
        prompt_tokens=st.integers(1, 200),
        new_tokens=st.integers(1, 40),
        after_s=st.sampled_from([0.0, 0.001, 0.004, 0.02]),
    )
    def online_arrives(self, prompt_tokens: int, new_tokens: int, after_s: float) -> None:
        """Now, or while a step runs, which is suspended if it can be."""
        prompt = [1000 + self.num_arrivals] * prompt_tokens
        self.arrives(RequestClass.ONLINE, prompt, new_tokens, after_s)

    @rule(
        prompt_tokens=st.integers(1, 200),
        new_tokens=st.integers(1, 40),
        token=st.integers(0, 1),
        can_pause=st.sampled_from([True, True, False]),
    )
    def offline_arrives(
        self, prompt_tokens: int, new_tokens: int, token: int, can_pause: bool
    ) -> None:
        self.arrives(RequestClass.OFFLINE, [token] * prompt_tokens, new_tokens, can_pause=can_pause)

    def arrives(
        self,
        request_class: RequestClass,
        prompt: list[int],
        new_tokens: int,
        after_s: float = 0.0,
        *,
        can_pause: bool = True,
    ) -> None:
        info = RequestInfo(
            f"{request_class.value}-{self.num_arrivals}",
            request_class,
            len(prompt),
            new_tokens,
            self.engine.now_s + after_s,
            can_pause=can_pause,
        )
        request = SimRequest(info, new_tokens, lambda: pack_tokens(prompt), self.num_arrivals)
        insort(self.source.coming, request, key=lambda one: one.info.arrival_s)
        self.num_arrivals += 1

    @rule(steps=st.integers(1, 20))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @rule(admits=st.integers(0, 2))
    def run_a_part(self, admits: int) -> None:
        """The engine admits fewer prefills than were planned."""
        self.engine.admits = admits
        self.engine.step()
        self.engine.admits = None

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.aborts(data.draw(st.sampled_from(self.live())))

    def aborts(self, request: SimRequest) -> None:
        rid = request.info.rid
        if rid in self.executor.admitted:
            release = Retraction(rid, request.computed_tokens)
            self.executor.begin(StepPlan(retract=(release,), skips_decodes=True))
        self.executor.withdraw(request)
        request.move(RequestState.ABORTED)
        self.scheduler.finish(rid, Ending.ABORTED)

    def live(self) -> list[SimRequest]:
        """Those that have not ended, but for those of the suspended step: they end with it."""
        suspended = self.executor.suspended
        away = suspended.requests if suspended else []
        return [r for r in self.engine.requests if not r.state.is_final and r not in away]

    @invariant()
    def engine_and_queue_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        check_executor(self.executor)
        suspended = self.executor.suspended
        away = suspended.requests if suspended else []
        assert not any(request.info.is_online for request in away)
        here = [one for one in self.executor.admitted.values() if one not in away]
        assert sum(one.state is RequestState.PREFILLING for one in here) <= 1
        offline = [one.info.rid for one in (*here, *away) if not one.info.is_online]
        assert all(map(self.scheduler.queue.is_running, offline))
        assert self.scheduler.queue.num_running == len(offline)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.engine.step():
                break
        left = [request.info.rid for request in self.engine.requests if not request.state.is_final]
        assert self.policy in RUNS_NO_OFFLINE or not left, f"never ended: {left}"
        assert len(self.engine.requests) == self.num_arrivals
        assert not self.executor.admitted
        assert self.executor.kv.held_tokens == 0
        assert self.scheduler.queue.num_running == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_keeps_the_contract(policy: str) -> None:
    machine = type(f"Machine_{policy}", (SchedulerMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )


def test_a_late_online_decode_that_resumes_is_no_offline_work() -> None:
    """Hypothesis found it under ``bros``, which lets online decodes pause: no budget stops it."""
    late = scenarios.online(50_000, RequestState.PAUSED, last_token_s=-1.0)
    prompt = scenarios.online(10, arrival_s=-0.988)
    seen = scenarios.snapshot(late, prompt, scenarios.offline(10))
    plan = scenarios.scheduler("bros").plan(seen, scenarios.NO_CACHE)
    assert plan.resume == (late.info.rid,)
    assert plan.predicted_s > plan.budget_s
    check_online_first(plan, seen, "bros")


def test_a_step_of_which_nothing_is_admitted_cannot_be_suspended() -> None:
    """Hypothesis found it under ``hygen``: an online request arrives before the step begins."""
    machine = SchedulerMachine()
    safepoint = SafepointConfig(num_layers=8, interval_layers=2, check_s=0.0)
    config = ExecutorConfig(
        kv_capacity_tokens=480, max_batch_tokens=48, safepoint=safepoint, overlap=True
    )
    machine.start(SchedulerConfig(), SloTargets(), config)
    machine.online_arrives(prompt_tokens=100, new_tokens=1, after_s=0.0)
    machine.online_arrives(prompt_tokens=1, new_tokens=1, after_s=0.001)
    machine.offline_arrives(prompt_tokens=1, new_tokens=1, token=0, can_pause=True)
    machine.run_a_part(admits=1)
    machine.aborts(machine.engine.requests[0])
    machine.run_a_part(admits=0)
    machine.teardown()
