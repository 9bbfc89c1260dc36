"""Every policy against an engine that checks each plan, under arbitrary traffic."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.scheduler.scenarios import MODEL
from core.scheduler.tiny_engine import TinyEngine
from sglang_coserve.core.control.slo import deadlines
from sglang_coserve.core.offline_queue import OfflineQueue, QueuedRequest, pack_tokens
from sglang_coserve.core.policies import POLICIES, make_policy
from sglang_coserve.core.request import RequestClass, RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import Overload, SchedulerConfig
from sglang_coserve.core.snapshot import EngineSnapshot, RequestInfo
from sglang_coserve.core.step import StepPlan
from sglang_coserve.metrics import SloTargets

KV_TOKENS = 480
# What the papers and the baselines define otherwise.
HOLDS_ONLINE_BACK = {"fcfs", "non_preemptive", "bros"}
RUNS_ALL_DECODES = {"fcfs", "non_preemptive", "priority", "sarathi"}

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


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive, steps run, requests are aborted; in the end all have ended."""

    policy = "conserve"

    @initialize(
        config=configs,
        slo=slo_targets,
        page_tokens=st.sampled_from([1, 16]),
        slots=st.sampled_from([2, 16]),
        max_batch_tokens=st.sampled_from([48, 512]),
        stop_share=st.sampled_from([1.0, 0.25]),
    )
    def start(
        self,
        config: SchedulerConfig,
        slo: SloTargets,
        page_tokens: int,
        slots: int,
        max_batch_tokens: int,
        stop_share: float,
    ) -> None:
        policy = make_policy(self.policy)
        queue = OfflineQueue(policy.queue_config())
        self.scheduler = Scheduler(policy, MODEL, deadlines(slo), queue, config)
        self.engine = TinyEngine(
            self.scheduler,
            MODEL,
            kv_tokens=KV_TOKENS,
            page_tokens=page_tokens,
            slots=slots,
            max_batch_tokens=max_batch_tokens,
            stop_share=stop_share,
        )

    @rule(
        prompt_tokens=st.integers(1, 200),
        new_tokens=st.integers(1, 40),
    )
    def online_arrives(self, prompt_tokens: int, new_tokens: int) -> None:
        self._arrive(RequestClass.ONLINE, prompt_tokens, new_tokens)

    @rule(
        prompt_tokens=st.integers(1, 200),
        new_tokens=st.integers(1, 40),
        token=st.integers(0, 1),
        can_pause=st.sampled_from([True, True, False]),
    )
    def offline_arrives(
        self, prompt_tokens: int, new_tokens: int, token: int, can_pause: bool
    ) -> None:
        rid = self._arrive(RequestClass.OFFLINE, prompt_tokens, new_tokens, can_pause=can_pause)
        self.scheduler.add_offline(
            QueuedRequest(rid, pack_tokens([token] * prompt_tokens), self.engine.now_s, new_tokens)
        )

    @rule(iterations=st.integers(1, 20))
    def run(self, iterations: int) -> None:
        for _ in range(iterations):
            self._step()

    @rule(admits=st.integers(0, 2))
    def run_a_part(self, admits: int) -> None:
        """The engine admits fewer prefills than were planned."""
        self._step(admits=admits)

    @rule(stops_at=st.floats(0.0, 1.0))
    def run_until_something_arrives(self, stops_at: float) -> None:
        """A step of the offline lane is suspended."""
        self._step(stops_at=stops_at)

    @precondition(lambda self: len(self.engine.ended) < len(self.engine.requests))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [rid for rid in self.engine.requests if rid not in self.engine.ended]
        self.engine.abort(data.draw(st.sampled_from(live)))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        offline_waits = self.policy == "online_only"
        for _ in range(5000):
            if len(self.engine.ended) == len(self.engine.requests):
                break
            plan = self._step()
            if offline_waits and plan.is_idle:
                break
        left = self.engine.requests.keys() - self.engine.ended.keys()
        assert offline_waits or not left, f"never ended: {left}"
        assert not self.engine.admitted
        assert self.engine.free_kv + sum(self.engine.cache.values()) == KV_TOKENS
        self.scheduler.queue.check_invariants()
        assert self.scheduler.queue.num_running == 0

    def _arrive(
        self,
        request_class: RequestClass,
        prompt_tokens: int,
        new_tokens: int,
        *,
        can_pause: bool = True,
    ) -> str:
        rid = f"{request_class.value}-{len(self.engine.requests)}"
        self.engine.arrive(
            RequestInfo(
                rid,
                request_class,
                prompt_tokens,
                new_tokens,
                self.engine.now_s,
                can_pause=can_pause,
            )
        )
        return rid

    def _step(self, **step: Any) -> StepPlan:
        snapshot = self.engine.snapshot()
        states = {request.info.rid: request.state for request in snapshot.admitted}
        plan = self.engine.step(**step)
        states |= dict.fromkeys(plan.pause, RequestState.PAUSED)
        states |= dict.fromkeys(plan.resume, RequestState.DECODING)
        offline_work = [
            rid
            for rid in (*(chunk.rid for chunk in plan.prefills), *states)
            if not self.engine.requests[rid].info.is_online
            and (
                (states.get(rid) is RequestState.DECODING and not plan.skips_decodes)
                or rid in dict(plan.prefills)
            )
            and rid not in dict(plan.retract)
        ]
        if offline_work and self.policy not in RUNS_ALL_DECODES:
            assert plan.predicted_s <= plan.budget_s
        if self.policy in RUNS_ALL_DECODES:
            offline_work = [rid for rid in offline_work if rid in dict(plan.prefills)]
        if offline_work and self.policy not in HOLDS_ONLINE_BACK:
            self._check_online_first(snapshot, plan)
        return plan

    def _check_online_first(self, snapshot: EngineSnapshot, plan: StepPlan) -> None:
        """No offline work runs while an online request could have used its place."""
        chunks = dict(plan.prefills)
        offline_kv = sum(
            self.engine._paged(request.computed_tokens)
            for request in snapshot.admitted
            if not request.info.is_online
        )
        reachable_kv = snapshot.free_kv_tokens + snapshot.evictable_kv_tokens + offline_kv
        for request in (*snapshot.admitted, *snapshot.waiting):
            rid = request.info.rid
            if not request.info.is_online or rid in plan.shed or rid in dict(plan.retract):
                continue
            if request.state in (RequestState.DECODING, RequestState.PAUSED):
                assert rid not in plan.pause
            elif rid in chunks:
                assert chunks[rid] == request.tokens_to_compute, "cut, and offline work runs"
            else:
                online_kv = sum(
                    self.engine._paged(chunk.tokens)
                    for chunk in plan.prefills
                    if self.engine.requests[chunk.rid].info.is_online
                )
                decodes = plan.batch.decode_requests * snapshot.page_tokens
                earlier = self.engine._paged(request.length_tokens)
                slots = self.engine.slots - sum(
                    request.info.is_online for request in snapshot.admitted
                )
                assert earlier + online_kv + decodes + 200 > reachable_kv or slots <= len(chunks), (
                    "left waiting, and offline work runs"
                )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_keeps_the_contract(policy: str) -> None:
    machine = type(f"Machine_{policy}", (SchedulerMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
