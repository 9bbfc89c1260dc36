"""The smallest engine that can carry out plans; it checks each of them on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.request import RequestState, check_transition
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.snapshot import EngineSnapshot, Request, RequestInfo, SuspendedStep
from sglang_coserve.core.step import Lane, PrefillChunk, ServedRequest, StepPlan, StepResult
from sglang_coserve.core.step_stats import StepStats

_S = RequestState


@dataclass
class _Live:
    info: RequestInfo
    state: RequestState = _S.WAITING
    generated: int = 0
    computed: int = 0
    last_token_s: float | None = None

    @property
    def length(self) -> int:
        return self.info.prompt_tokens + self.generated


@dataclass
class _Suspended:
    plan: StepPlan
    started_s: float
    batch: StepStats
    prefills: tuple[PrefillChunk, ...]
    decodes: list[str]
    done_share: float = 0.0
    spent_s: float = 0.0

    @property
    def work(self) -> dict[str, int]:
        """Tokens to compute by rid."""
        return {**dict.fromkeys(self.decodes, 1), **dict(self.prefills)}


class TinyEngine:
    """Requests, pages and a clock; tokens are only counted.

    The head of a retracted request stays in a cache, page by page, until its slots
    are needed. Nothing is shared between requests.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model: LatencyModel,
        *,
        kv_tokens: int,
        page_tokens: int,
        slots: int,
        max_batch_tokens: int,
        stop_share: float = 1.0,
    ) -> None:
        assert kv_tokens % page_tokens == 0
        self.scheduler = scheduler
        self.model = model
        self.kv_tokens = kv_tokens
        self.page_tokens = page_tokens
        self.slots = slots
        self.max_batch_tokens = max_batch_tokens
        self.stop_share = stop_share
        self.suspended: _Suspended | None = None
        self.num_suspensions = self.num_drops = 0
        self._aborted: set[str] = set()
        """Of the suspended step: they end with it."""

        self.now_s = 0.0
        self.slowness = 1.0
        """How much longer steps take than predicted."""

        self.requests: dict[str, _Live] = {}
        self.admitted: list[str] = []
        self.waiting: list[str] = []
        self.cache: dict[str, int] = {}
        self.ended: dict[str, RequestState] = {}
        self.log: list[StepPlan] = []
        self._finished: list[str] = []

    def cached_tokens(self, rid: str) -> int:
        cached = min(self.cache.get(rid, 0), self.requests[rid].length - 1)
        return cached - cached % self.page_tokens

    def arrive(self, info: RequestInfo) -> None:
        self.requests[info.rid] = _Live(info)
        if info.is_online:
            self.waiting.append(info.rid)
            self.scheduler.arrived(info)

    def abort(self, rid: str) -> None:
        if self.suspended is not None and rid in self.suspended.work:
            self._aborted.add(rid)
        else:
            self._end(rid, _S.ABORTED)

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            now_s=self.now_s,
            admitted=[self._seen(rid) for rid in self.admitted if rid not in self._suspended_work],
            waiting=[
                self._seen(rid)._replace(cached_tokens=self.cached_tokens(rid))
                for rid in self.waiting
            ],
            free_kv_tokens=self.free_kv,
            evictable_kv_tokens=sum(self.cache.values()),
            free_slots=self.slots - len(self.admitted),
            max_batch_tokens=self.max_batch_tokens,
            page_tokens=self.page_tokens,
            stop_share=self.stop_share,
            suspended=(
                None
                if (held := self.suspended) is None
                else SuspendedStep(held.plan.step, held.batch, held.done_share)
            ),
        )

    @property
    def _suspended_work(self) -> dict[str, int]:
        return {} if self.suspended is None else self.suspended.work

    @property
    def free_kv(self) -> int:
        # A step has taken the KV of what it is to compute when it is suspended.
        work = self._suspended_work
        held = sum(
            self._paged(self.requests[rid].computed + work.get(rid, 0)) for rid in self.admitted
        )
        return self.kv_tokens - held - sum(self.cache.values())

    def step(self, *, admits: int | None = None, stops_at: float = 1.0) -> StepPlan:
        """Run one step, or a part of it; every rule of the contract is asserted.

        Args:
            admits: How many of the planned prefills run; None: all.
            stops_at: A step of the offline lane is suspended when this share of it is done.
        """
        snapshot = self.snapshot()
        plan = self.scheduler.plan(snapshot, self)
        assert plan == self.scheduler.plan(snapshot, self), "plan changed something"
        if plan.drops:
            self._drop()
            snapshot = self.snapshot()
            plan = self.scheduler.plan(snapshot, self)
            assert not plan.drops
        if plan.resumes:
            assert self.suspended is not None
            assert plan.step == self.suspended.plan.step
            assert plan.batch == self.suspended.batch
            self.log.append(plan)
            self._run_alone(plan, stops_at)
            return plan
        prefills = plan.prefills[:admits]
        if not plan.is_idle:
            self.scheduler.start(plan, prefills)
        self.log.append(plan)
        self._change_requests(plan)

        alone = plan.lane is Lane.OFFLINE
        state = _S.PAUSED if alone else _S.DECODING
        decodes = [
            rid
            for rid in self.admitted
            if self.requests[rid].state is state
            and not (alone and self.requests[rid].info.is_online)
            and rid not in self._suspended_work
        ]
        if plan.skips_decodes:
            assert plan.prefills or plan.is_idle, "an iteration for nobody"
            decodes = []
        contexts = [self.requests[rid].computed for rid in decodes]
        chunks = self._begin_chunks(prefills)
        batch = StepStats.of(chunks, contexts)
        if prefills == plan.prefills:
            assert plan.batch == batch
            assert plan.predicted_s == self.model.predict(plan.batch)
        assert batch.prefill_tokens + len(decodes) <= max(self.max_batch_tokens, len(decodes))

        if alone and not batch.is_empty:
            assert self.stop_share < 1
            assert self.suspended is None, "two steps are suspended"
            self.suspended = _Suspended(plan, self.now_s, batch, prefills, decodes)
            assert self.free_kv + sum(self.cache.values()) >= 0
            assert not any(self.requests[rid].info.is_online for rid in self._suspended_work)
            self._run_alone(plan, stops_at)
            return plan
        started_s = self.now_s
        seconds = 0.0 if batch.is_empty else self.model.predict(batch) * self.slowness
        self.now_s += seconds
        served = self._compute_all(decodes, prefills)
        result = StepResult(plan.step, started_s, seconds or None, batch, prefills, served)
        assert len(self._unfinished()) <= 1, "two unfinished prefills run"
        if not plan.is_idle:
            self.scheduler.update(result)
        self._finish()
        return plan

    def _finish(self) -> None:
        for rid in self._finished:
            self.scheduler.finish(rid)
        self._finished.clear()

    def _run_alone(self, plan: StepPlan, stops_at: float) -> None:
        """Run the step of the offline lane on, up to a safepoint or its end."""
        step = self.suspended
        assert step is not None
        whole_s = self.model.predict(step.batch) * self.slowness
        until_share = 1.0
        if plan.until_s < self.now_s + (1 - step.done_share) * whole_s:
            until_share = step.done_share + (plan.until_s - self.now_s) / whole_s
        # The next safepoint.
        share = -(-min(stops_at, until_share) // self.stop_share) * self.stop_share
        share = min(max(share, step.done_share), 1.0)
        self.now_s += (share - step.done_share) * whole_s
        step.spent_s += (share - step.done_share) * whole_s
        step.done_share = share
        if share < 1.0:
            self.num_suspensions += 1
            return
        self.suspended = None
        served = self._compute_all(step.decodes, step.prefills, _S.PAUSED)
        self.scheduler.update(
            StepResult(
                step.plan.step, step.started_s, step.spent_s, step.batch, step.prefills, served
            )
        )
        self._finish()
        self._end_aborted()

    def _drop(self) -> None:
        """Give the suspended step up: its requests wait again."""
        step, self.suspended = self.suspended, None
        assert step is not None
        self.num_drops += 1
        rids = tuple(step.work)
        for rid in rids:
            self._wait_again(rid, self.requests[rid].computed)
        self.scheduler.update(StepResult(step.plan.step, step.started_s, dropped=rids))
        self._end_aborted()

    def _end_aborted(self) -> None:
        for rid in sorted(self._aborted - self.ended.keys()):
            self._end(rid, _S.ABORTED)
        self._aborted.clear()

    def _unfinished(self) -> list[str]:
        return [
            rid
            for rid in self.admitted
            if self.requests[rid].state is _S.PREFILLING and rid not in self._suspended_work
        ]

    def _change_requests(self, plan: StepPlan) -> None:
        for rid in plan.shed:
            assert rid in self.waiting
            self._end(rid, _S.ABORTED)
        for rid, tokens in plan.retract:
            self._retract(rid, tokens)
        pausing: list[str] = []
        for rid in plan.pause:
            # Of a batch without online requests all are moved at once.
            decoding = [r for r in self.requests.values() if r.state is _S.DECODING]
            is_whole = plan.lane is Lane.OFFLINE and not any(r.info.is_online for r in decoding)
            assert self.requests[rid].info.can_pause or is_whole
            pausing.append(rid)
        for rid in pausing:
            self._enter(rid, _S.PAUSED)
        for rid in plan.resume:
            self._enter(rid, _S.DECODING)
        for rid in plan.park:
            self._enter(rid, _S.PARKED)

    def _begin_chunks(self, prefills: Sequence[PrefillChunk]) -> list[tuple[int, int]]:
        """Return the tokens and context of each chunk."""
        for rid in self._unfinished():
            if rid not in dict(prefills):
                self._enter(rid, _S.PARKED)
        chunks = []
        for rid, tokens in prefills:
            live = self.requests[rid]
            if rid not in self.admitted:
                self._admit(rid)
            elif live.state is _S.PARKED:
                self._enter(rid, _S.PREFILLING)
            assert live.state is _S.PREFILLING
            assert 0 < tokens <= live.length - live.computed
            chunks.append((tokens, live.computed))
        assert len(self.admitted) <= self.slots
        return chunks

    def _compute_all(
        self,
        decodes: Sequence[str],
        prefills: Sequence[PrefillChunk],
        decoding: RequestState = _S.DECODING,
    ) -> tuple[ServedRequest, ...]:
        """Compute; a prefill that is complete enters the state ``decoding``."""
        work = [*((rid, 1) for rid in decodes), *prefills]
        requests = [self.requests[rid] for rid, _ in work]
        before = [live.generated for live in requests]
        for rid, tokens in work:
            self._compute(rid, tokens, decoding)
        return tuple(
            ServedRequest(live.info, self.now_s if live.generated > generated else None)
            for live, generated in zip(requests, before, strict=True)
            if live.info.is_online
        )

    def _seen(self, rid: str) -> Request:
        live = self.requests[rid]
        return Request(live.info, live.state, live.generated, live.computed, 0, live.last_token_s)

    def _paged(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens) * self.page_tokens

    def _enter(self, rid: str, state: RequestState) -> None:
        live = self.requests[rid]
        live.state = check_transition(live.state, state)

    def _admit(self, rid: str) -> None:
        live = self.requests[rid]
        live.computed = self.cached_tokens(rid)
        self.cache.pop(rid, None)
        if rid in self.waiting:
            self.waiting.remove(rid)
        else:
            assert self.scheduler.queue.is_running(rid), f"{rid} was not taken"
        self.admitted.append(rid)
        self._enter(rid, _S.PREFILLING)

    def _retract(self, rid: str, tokens: int) -> None:
        computed = self.requests[rid].computed
        assert 0 < tokens <= computed
        self._wait_again(rid, computed - tokens)

    def _wait_again(self, rid: str, kept_tokens: int) -> None:
        """Release a request, of which the cache keeps the first tokens."""
        live = self.requests[rid]
        self.admitted.remove(rid)
        self._enter(rid, _S.WAITING)
        live.computed = 0
        if kept_tokens >= self.page_tokens:
            self.cache[rid] = kept_tokens - kept_tokens % self.page_tokens
        if live.info.is_online:
            self.waiting.insert(0, rid)
        else:
            self.scheduler.restore(rid, live.generated)

    def _compute(self, rid: str, tokens: int, decoding: RequestState) -> None:
        live = self.requests[rid]
        live.computed += tokens
        while self.free_kv < 0:
            assert self.cache, "KV over capacity"
            del self.cache[next(iter(self.cache))]
        if live.computed < live.length:
            return
        if live.state is _S.PREFILLING:
            self._enter(rid, decoding)
        live.generated += 1
        live.last_token_s = self.now_s
        if live.generated >= live.info.max_new_tokens:
            self._end(rid, _S.FINISHED)

    def _end(self, rid: str, state: RequestState) -> None:
        assert rid not in self.ended, f"{rid} ends twice"
        self._enter(rid, state)
        self.ended[rid] = state
        for place in (self.admitted, self.waiting):
            if rid in place:
                place.remove(rid)
        self.cache.pop(rid, None)
        if state is _S.FINISHED:
            self._finished.append(rid)  # The scheduler has yet to hear of its last token.
        else:
            self.scheduler.finish(rid)
