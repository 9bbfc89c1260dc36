"""The modelled executor: carries out plans on counters instead of a device.

It models memory and time but makes no scheduling decisions: it does whatever a plan
says. A plan that an engine could not carry out is a bug of the
scheduler, and raises ``AssertionError``.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import Final

from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import EngineSnapshot, Request
from sglang_coserve.core.step import Lane, StepPlan
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.host_kv import HostKv
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.request_kv import RequestKv
from sglang_coserve.simulator.running_step import RunningStep, StepDuration

_DECODES_IN: Final = {Lane.SHARED: RequestState.DECODING, Lane.OFFLINE: RequestState.PAUSED}


class SimulatedExecutor:
    """The requests of one engine, their KV, and the time that steps take.

    Also implements the core's ``PrefixCache``. A step costs O(requests), plus O(prompt)
    for each chunk.
    """

    def __init__(self, config: ExecutorConfig, model: LatencyModel) -> None:
        """``model`` gives the real step times; the scheduler may use another model."""
        self.config = config
        self.kv = RequestKv(config)
        self.cache = self.kv.cache
        self._duration = StepDuration(config, model)
        self.admitted: dict[str, SimRequest] = {}
        """Requests that hold KV, in order of admission."""

        self.num_online = 0
        self.waiting: list[SimRequest] = []
        """Online requests without KV, in order of arrival."""

        self.offline_waiting: dict[str, SimRequest] = {}
        self.host = HostKv(self.kv, config.checkpoint_tokens_per_s, self.offline_waiting.get)
        self.suspended: RunningStep | None = None
        """The suspended step. It holds its KV, and its requests are in no other step."""

        self._ended: list[SimRequest] = []
        """With overlap: requests that are complete, but part of the step already planned."""

    def submit(self, request: SimRequest) -> None:
        """Add a request that has arrived, or that comes from another engine."""
        if request.info.is_online:
            insort(self.waiting, request, key=_arrival_order)
        else:
            self.offline_waiting[request.info.rid] = request

    def can_hold(self, request: SimRequest) -> bool:
        """Return whether the prompt and the longest possible output fit the device at all."""
        length_tokens = request.info.prompt_tokens + request.info.max_new_tokens
        return self.kv.pages_of(length_tokens) <= self.kv.capacity_pages

    def cached_tokens(self, rid: str) -> int | None:
        """Return how many leading tokens of a waiting offline request need not be computed; None
        while more of them are being loaded."""
        if self.host.is_held(rid):
            return None
        return self.kv.cached_tokens(self.offline_waiting[rid])

    def hold_back(self, plan: StepPlan, now_s: float) -> bool:
        """Return whether a planned request must first get its KV from host memory.

        That is begun, and it is not to be admitted until then: the plan is to be made anew.
        """
        waiting = self.offline_waiting
        planned = [waiting[chunk.rid] for chunk in plan.prefills if chunk.rid in waiting]
        return self.host.hold_back(planned, now_s)

    def snapshot(self, now_s: float) -> EngineSnapshot:
        """Return the state of the engine between two steps."""
        self.kv.now_s = now_s
        version = self.cache.version
        for request in self.waiting:
            if request.match_version != version:
                request.match_version = version
                request.refresh_view(self.kv.cached_tokens(request))
        self.kv.note_sharing(self.admitted.values())
        kv, config, suspended = self.kv, self.config, self.suspended
        admitted: Iterable[SimRequest] = self.admitted.values()
        if suspended:
            away = set(suspended.requests)
            admitted = (request for request in admitted if request not in away)
        safepoint = config.safepoint
        return EngineSnapshot(
            now_s=now_s,
            admitted=[request.view for request in admitted],
            waiting=[request.view for request in self.waiting],
            free_kv_tokens=kv.free_pages * kv.page_tokens,
            evictable_kv_tokens=self.cache.evictable_tokens,
            free_slots=config.max_running_requests - len(self.admitted) - len(self._ended),
            max_batch_tokens=config.max_batch_tokens,
            chunk_rules=config.chunk_rules,
            page_tokens=kv.page_tokens,
            keeps_prefixes=config.prefix_cache,
            suspended=suspended.suspended() if suspended else None,
            stop_share=safepoint.stop_share if safepoint else 1.0,
            resume_s=safepoint.resume_s if safepoint else 0.0,
        )

    def begin(self, plan: StepPlan, now_s: float = 0.0) -> RunningStep:
        """Change memory and states as planned, and start the step."""
        shed = [self._shed(rid) for rid in plan.shed]
        retracted = [self._retract(self.admitted[rid], tokens) for rid, tokens in plan.retract]
        for rids, state in (
            (plan.pause, RequestState.PAUSED),
            (plan.resume, RequestState.DECODING),
            (plan.park, RequestState.PARKED),
        ):
            for rid in rids:
                self.admitted[rid].move(state)
                self.admitted[rid].refresh_view()
        decodes = self._decodes_of(plan)
        contexts = [request.computed_tokens for request in decodes]
        batch = RunningStep(
            plan=plan,
            started_s=now_s,
            decodes=decodes,
            online_decodes=[request for request in decodes if request.info.is_online],
            retracted=retracted,
            shed=shed,
        )
        batch.opened_pages = sum([tokens % self.kv.page_tokens == 0 for tokens in contexts])
        for rid, tokens in plan.prefills:
            batch.opened_pages += self._begin_chunk(batch, rid, tokens)
        self.kv.allocate(batch.opened_pages)
        stats = StepStats.of(
            [(tokens, request.computed_tokens) for request, tokens in batch.chunks], contexts
        )
        assert stats == plan.batch, f"planned {plan.batch}, found {stats}"
        batch.seconds = self._duration.seconds(batch, self._ended)
        return batch

    def end(self, batch: RunningStep, end_s: float) -> list[SimRequest]:
        """Finish a step; return the requests that ended."""
        self.kv.now_s = end_s
        self._release_ended()
        ended: list[SimRequest] = []
        page_tokens = self.kv.page_tokens
        saves = self.host.saves
        new_view = tuple.__new__
        decoding = _DECODES_IN[batch.plan.lane]
        for request in batch.decodes:
            request.computed_tokens = computed = request.computed_tokens + 1
            times_s = request.token_times_s
            times_s.append(end_s)
            generated = len(times_s)
            if generated == request.output_tokens:
                ended.append(request)
                continue
            info, shared = request.info, request.shared_tokens
            # Like Request(), at half the cost: this loop takes most of a step.
            row = (info, decoding, generated, computed, shared, end_s, request.token_times_s[0])
            request.view = new_view(Request, row)
            if saves and computed % page_tokens == 0 and not info.is_online:
                self.host.mark(request)
        for request, tokens in batch.chunks:
            self._end_chunk(request, tokens, end_s, decoding)
            if request.is_complete:
                ended.append(request)
        for request in ended:
            self._finish(request)
        if saves:
            self.host.save(batch.spent_s)
        return ended

    def drop(self) -> list[SimRequest]:
        """Drop the suspended step; return its requests, which wait again."""
        batch, self.suspended = self.suspended, None
        assert batch is not None
        self.kv.free(batch.opened_pages)
        # The prefix cache keeps what they had before the step.
        return [self._retract(request, 0) for request in batch.requests]

    def withdraw(self, request: SimRequest) -> None:
        """Remove a waiting request."""
        if request.info.is_online:
            self.waiting.remove(request)
        else:
            del self.offline_waiting[request.info.rid]

    def hand_over(self, rid: str) -> tuple[SimRequest, int]:
        """Remove a decoding request; return it and its KV tokens, as arguments for ``adopt``."""
        request = self.admitted[rid]
        assert request.has_prompt, f"{rid} is {request.state}"
        kv_tokens = request.computed_tokens
        request.know_output()
        request.computed_ever_tokens = max(request.computed_ever_tokens, kv_tokens)
        request.lost_tokens += kv_tokens
        self.kv.release(request)
        self._remove_admitted(request)
        request.move(RequestState.WAITING)
        return request, kv_tokens

    def has_room_for(self, kv_tokens: int) -> bool:
        """Return whether ``adopt`` has room for a request with so much KV and one more token."""
        slots = self.config.max_running_requests - len(self.admitted) - len(self._ended)
        return slots > 0 and self.kv.pages_of(kv_tokens + 1) <= self.kv.room_pages

    def adopt(self, request: SimRequest, kv_tokens: int) -> None:
        """Add a decoding request of another executor, with its KV."""
        self.kv.allocate(self.kv.pages_of(kv_tokens))
        request.computed_tokens = kv_tokens
        request.reloaded_tokens += kv_tokens
        request.lock = self.cache.root
        request.saved_tokens = 0
        self._add_admitted(request)
        request.move(RequestState.DECODING)
        request.refresh_view()

    def settle(self) -> bool:
        """Release the memory of ended requests; return whether there were any."""
        has_ended = bool(self._ended)
        self._release_ended()
        return has_ended

    def _begin_chunk(self, batch: RunningStep, rid: str, tokens: int) -> int:
        """Add a chunk to the batch; return the pages that it needs."""
        pages_of = self.kv.pages_of
        request = self.admitted.get(rid)
        if request is None:
            request = self._admit(rid)
        else:
            request.move(RequestState.PREFILLING)
        assert request.state is RequestState.PREFILLING, f"{rid} is {request.state}"
        computed = request.computed_tokens
        left_tokens, rules = request.length_tokens - computed, self.config.chunk_rules
        assert 0 < tokens <= left_tokens, f"{rid}: chunk of {tokens} tokens"
        keeps_rules = rules.may_cut and tokens % rules.align_tokens == 0
        assert tokens == left_tokens or keeps_rules, f"{rid}: {rules}, chunk of {tokens} tokens"
        batch.chunks.append((request, tokens))
        return pages_of(computed + tokens) - pages_of(computed)

    def _admit(self, rid: str) -> SimRequest:
        """Admit a waiting request."""
        request = self.offline_waiting.pop(rid, None)
        if request is None:
            index = next(i for i, r in enumerate(self.waiting) if r.info.rid == rid)
            request = self.waiting.pop(index)
        self.kv.admit(request)
        if request.num_admissions == 0:
            request.cached_prompt_tokens = request.locked_tokens
        request.num_admissions += 1
        request.move(RequestState.PREFILLING)
        self._add_admitted(request)
        assert len(self.admitted) + len(self._ended) <= self.config.max_running_requests, (
            "no slot free"
        )
        return request

    def _end_chunk(
        self, request: SimRequest, tokens: int, end_s: float, decoding: RequestState
    ) -> None:
        start = request.computed_tokens
        request.computed_tokens = computed = start + tokens
        request.prefilled_tokens += tokens
        redone_to = min(computed, request.computed_ever_tokens)
        request.recomputed_tokens += max(0, redone_to - start)
        self.kv.share(request, min(computed, request.info.prompt_tokens))
        if computed == request.length_tokens:
            request.num_prefills += 1
            request.token_times_s.append(end_s)
            request.move(decoding)
        request.refresh_view()
        if self.host.saves and not request.info.is_online:
            self.host.mark(request)

    def _shed(self, rid: str) -> SimRequest:
        request = next(r for r in self.waiting if r.info.rid == rid)
        self.waiting.remove(request)
        request.move(RequestState.ABORTED)
        return request

    def _retract(self, request: SimRequest, tokens: int) -> SimRequest:
        """Retract a request: release its last tokens; the first ones stay in the prefix cache."""
        head_tokens = request.computed_tokens - tokens
        assert head_tokens >= 0, f"{request.info.rid}: {tokens} tokens of {request.computed_tokens}"
        request.know_output()
        self.kv.share(request, head_tokens)
        request.computed_ever_tokens = max(request.computed_ever_tokens, request.computed_tokens)
        request.lost_tokens += request.computed_tokens
        self.kv.release(request)
        self._remove_admitted(request)
        request.move(RequestState.WAITING)
        request.refresh_view()
        request.match_version = -1
        self.submit(request)
        return request

    def _finish(self, request: SimRequest) -> None:
        request.move(RequestState.FINISHED)
        self._remove_admitted(request)
        if self.config.overlap:
            self._ended.append(request)
        else:
            self.kv.release(request)

    def _add_admitted(self, request: SimRequest) -> None:
        self.admitted[request.info.rid] = request
        self.num_online += request.info.is_online

    def _remove_admitted(self, request: SimRequest) -> None:
        del self.admitted[request.info.rid]
        self.num_online -= request.info.is_online

    def _release_ended(self) -> None:
        for request in self._ended:
            self.kv.release(request)
        self._ended.clear()

    def _decodes_of(self, plan: StepPlan) -> list[SimRequest]:
        """Return the requests that decode in a step. O(requests)."""
        if plan.skips_decodes:
            return []
        # Where a step of the offline lane begins, none is suspended, and nothing online decodes.
        state = _DECODES_IN[plan.lane]
        return [request for request in self.admitted.values() if request.state is state]


def _arrival_order(request: SimRequest) -> tuple[float, str]:
    return request.info.arrival_s, request.info.rid
