"""Conservation of tokens, KV and requests under any plan that an engine could carry out."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sglang_coserve.core.request import RequestClass, RequestState
from sglang_coserve.core.snapshot import EngineSnapshot, Request
from sglang_coserve.core.step import Lane, PrefillChunk, Retraction, StepPlan
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.running_step import RunningStep
from simulator.engines import MS_PER_TOKEN, check_executor, sim_request

PAGE = 4
CAPACITY = 80


class Plans(RuleBasedStateMachine):
    """Draws plans instead of deciding on them."""

    @initialize(
        prefix_cache=st.booleans(),
        overlap=st.booleans(),
        copied_per_s=st.sampled_from([0, 50, 1e6]),
    )
    def start(self, prefix_cache: bool, overlap: bool, copied_per_s: float) -> None:
        self.executor = SimulatedExecutor(
            ExecutorConfig(
                kv_capacity_tokens=CAPACITY,
                page_tokens=PAGE,
                max_running_requests=5,
                prefix_cache=prefix_cache,
                overlap=overlap,
                checkpoint_tokens_per_s=copied_per_s,
            ),
            MS_PER_TOKEN,
        )
        self.now_s = 0.0
        self.requests: dict[str, SimRequest] = {}
        self.ended: list[str] = []
        self.computed_tokens = 0

    @rule(
        is_online=st.booleans(),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        output_tokens=st.integers(1, 8),
    )
    def submit(self, is_online: bool, prompt: list[int], output_tokens: int) -> None:
        rid = f"r{len(self.requests)}"
        request_class = RequestClass.ONLINE if is_online else RequestClass.OFFLINE
        request = sim_request(rid, request_class, prompt, output_tokens, self.now_s)
        self.requests[rid] = request
        self.executor.submit(request)

    @rule(data=st.data(), suspend=st.booleans())
    def iterate(self, data: st.DataObject, suspend: bool) -> None:
        executor = self.executor
        lane = Lane.SHARED
        if executor.suspended is None:
            lane = data.draw(st.sampled_from(Lane), "lane")
        executor.host.advance(self.now_s)
        plan = self.draw_plan(data, executor.snapshot(self.now_s), lane)
        if data.draw(st.booleans(), "hold back"):
            while executor.hold_back(plan, self.now_s):
                plan = self.draw_plan(data, executor.snapshot(self.now_s), lane)
        batch = executor.begin(plan)
        assert {request.info.rid for request in batch.retracted} == {rid for rid, _ in plan.retract}
        self.now_s += 0.01
        if suspend and lane is Lane.OFFLINE and not plan.is_idle:
            executor.suspended = batch
            return
        self.end(batch)

    @precondition(lambda self: self.executor.suspended is not None)
    @rule()
    def resume(self) -> None:
        batch, self.executor.suspended = self.executor.suspended, None
        assert batch is not None
        self.end(batch)

    @precondition(lambda self: self.executor.suspended is not None)
    @rule()
    def drop(self) -> None:
        executor = self.executor
        assert executor.suspended is not None
        requests = set(executor.suspended.requests)
        assert set(executor.drop()) == requests
        assert not requests & set(executor.admitted.values())

    def end(self, batch: RunningStep) -> None:
        self.computed_tokens += sum(batch.tokens_by_class())
        batch.spent_s = 0.01
        ended = self.executor.end(batch, self.now_s)
        self.ended += [request.info.rid for request in ended]

    def draw_plan(self, data: st.DataObject, snapshot: EngineSnapshot, lane: Lane) -> StepPlan:
        is_alone = lane is Lane.OFFLINE
        here = RequestState.PAUSED if is_alone else RequestState.DECODING
        room = snapshot.free_kv_tokens + snapshot.evictable_kv_tokens
        slots = snapshot.free_slots
        kept = {one.info.rid: one for one in snapshot.admitted}
        retract = []
        for one in snapshot.admitted:
            if data.draw(st.integers(0, 9), "retract") == 0:
                retract.append(
                    Retraction(one.info.rid, data.draw(st.integers(1, one.computed_tokens)))
                )
                del kept[one.info.rid]
        switches: dict[str, list[str]] = {"pause": [], "resume": [], "park": []}
        decodes, prefills = [], []
        for one in kept.values():
            if is_alone and one.info.is_online:
                continue
            runs = data.draw(st.booleans(), "runs")
            if one.state in (RequestState.DECODING, RequestState.PAUSED):
                # Offline requests cannot leave their lane in one of its own steps.
                runs = (runs or (is_alone and one.state is here)) and (
                    need := PAGE * (one.computed_tokens % PAGE == 0)
                ) <= room
                if runs:
                    room -= need
                    decodes.append(one.computed_tokens)
                elif is_alone and one.state is here:
                    retract.append(Retraction(one.info.rid, one.computed_tokens))
                if runs and one.state is not here:
                    switches["pause" if is_alone else "resume"].append(one.info.rid)
                elif not runs and not is_alone and one.state is here:
                    switches["pause"].append(one.info.rid)
            else:
                chunk = self.draw_chunk(data, one, room) if runs else 0
                if chunk:
                    room -= slots_of(one.computed_tokens + chunk) - slots_of(one.computed_tokens)
                    prefills.append((one.info.rid, chunk, one.computed_tokens))
                elif one.state is RequestState.PREFILLING:
                    switches["park"].append(one.info.rid)
        offline = list(self.executor.offline_waiting.values())
        for request in offline if is_alone else (*self.executor.waiting, *offline):
            rid = request.info.rid
            if slots == 0 or not data.draw(st.booleans(), "admit"):
                continue
            cached = (
                request.view.cached_tokens
                if request.info.is_online
                else self.executor.cached_tokens(rid)
            )
            if cached is None:
                continue  # It is held back.
            one = request.view._replace(cached_tokens=cached)
            if chunk := self.draw_chunk(data, one, room - slots_of(cached)):
                room -= slots_of(cached + chunk)
                slots -= 1
                prefills.append((rid, chunk, cached))
        return StepPlan(
            lane=lane,
            retract=tuple(retract),
            pause=tuple(switches["pause"]),
            resume=tuple(switches["resume"]),
            park=tuple(switches["park"]),
            prefills=tuple(PrefillChunk(rid, tokens) for rid, tokens, _ in prefills),
            batch=StepStats.of(((tokens, cached) for _, tokens, cached in prefills), decodes),
        )

    def draw_chunk(self, data: st.DataObject, request: Request, room: int) -> int:
        most = min(request.tokens_to_compute, room - PAGE)
        return data.draw(st.integers(0, most), "chunk") if most > 0 else 0

    @invariant()
    def nothing_is_lost(self) -> None:
        executor = self.executor
        check_executor(executor)
        places = [
            *executor.admitted,
            *(r.info.rid for r in executor.waiting),
            *executor.offline_waiting,
        ]
        assert sorted(places + self.ended) == sorted(self.requests)
        snapshot = executor.snapshot(self.now_s)
        for request in executor.admitted.values():
            shared = executor.cache.shared_tokens(request.lock) if request.lock else 0
            assert request.view.cached_tokens == (shared if request.computed_tokens else 0)
        slots = snapshot.free_kv_tokens + snapshot.evictable_kv_tokens + executor.kv.held_tokens
        assert slots == CAPACITY

    @invariant()
    def every_token_is_accounted_for(self) -> None:
        worked = sum(request.worked_tokens for request in self.requests.values())
        assert worked == self.computed_tokens
        for rid in self.ended:
            request = self.requests[rid]
            assert request.state is RequestState.FINISHED
            assert len(request.token_times_s) == request.output_tokens
            needed = request.info.prompt_tokens + request.output_tokens - 1
            kept = request.worked_tokens + request.given_tokens + request.reloaded_tokens
            assert kept - request.lost_tokens == needed
            assert request.worked_tokens + request.cached_prompt_tokens >= (
                needed - request.reloaded_tokens - request.given_tokens
            )
            assert request.recomputed_tokens <= request.lost_tokens


def slots_of(tokens: int) -> int:
    return -(-tokens // PAGE) * PAGE


Plans.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestPlans = Plans.TestCase
