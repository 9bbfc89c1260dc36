"""The smallest engine that can carry out plans; it checks each of them on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.request import RequestState, check_transition
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.snapshot import EngineSnapshot, RequestInfo, Row
from sglang_coserve.core.step import PrefillChunk, Served, StepPlan, StepResult

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


class TinyEngine:
    """Requests, pages and a clock; tokens are only counted.

    The head of an evicted request stays in a cache, page by page, until its slots
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
    ) -> None:
        assert kv_tokens % page_tokens == 0
        self.scheduler = scheduler
        self.model = model
        self.kv_tokens = kv_tokens
        self.page_tokens = page_tokens
        self.slots = slots
        self.max_batch_tokens = max_batch_tokens
        self.now_s = 0.0
        self.slowness = 1.0
        """How much longer steps take than predicted."""

        self.requests: dict[str, _Live] = {}
        self.rows: list[str] = []
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
        self._end(rid, _S.ABORTED)

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            now_s=self.now_s,
            rows=[self._row(rid) for rid in self.rows],
            waiting=[
                self._row(rid)._replace(cached_tokens=self.cached_tokens(rid))
                for rid in self.waiting
            ],
            free_kv_tokens=self.free_kv,
            evictable_kv_tokens=sum(self.cache.values()),
            free_slots=self.slots - len(self.rows),
            max_batch_tokens=self.max_batch_tokens,
            page_tokens=self.page_tokens,
        )

    @property
    def free_kv(self) -> int:
        held = sum(self._paged(self.requests[rid].computed) for rid in self.rows)
        return self.kv_tokens - held - sum(self.cache.values())

    def step(self, *, admits: int | None = None, gives_up: bool = False) -> StepPlan:
        """Run one step; every rule of the contract is asserted.

        Args:
            admits: How many of the planned prefills run; None: all.
            gives_up: Nothing of it is computed in the end.
        """
        snapshot = self.snapshot()
        plan = self.scheduler.plan(snapshot, self)
        assert plan == self.scheduler.plan(snapshot, self), "plan changed something"
        prefills = plan.prefills[:admits]
        if not plan.is_idle:
            self.scheduler.start(plan, prefills)
        self.log.append(plan)
        self._change_rows(plan)

        decodes = [rid for rid in self.rows if self.requests[rid].state is _S.DECODING]
        if plan.skips_decodes:
            assert plan.prefills, "an iteration for nobody"
            decodes = []
        contexts = [self.requests[rid].computed for rid in decodes]
        chunks, admitted = self._begin_chunks(prefills)
        batch = BatchStats.of(chunks, contexts)
        if prefills == plan.prefills:
            assert plan.batch == batch
            assert plan.predicted_s == self.model.predict(plan.batch)
        assert batch.prefill_tokens + len(decodes) <= max(self.max_batch_tokens, len(decodes))

        started_s = self.now_s
        seconds = 0.0 if batch.is_empty else self.model.predict(batch) * self.slowness
        self.now_s += seconds
        if gives_up:
            rids = (*decodes, *dict(prefills))
            for rid in admitted:
                self._put_back(rid)
            for rid in self._unfinished()[1:]:  # As the engine, which knows only one.
                self._enter(rid, _S.PARKED)
            result = StepResult(plan.step, started_s, seconds or None, given_up=rids)
        else:
            served = self._compute_all(decodes, prefills)
            result = StepResult(plan.step, started_s, seconds or None, batch, prefills, served)
        assert len(self._unfinished()) <= 1, "two unfinished prefills run"
        if not plan.is_idle:
            self.scheduler.update(result)
        for rid in self._finished:
            self.scheduler.finish(rid)
        self._finished.clear()
        return plan

    def _unfinished(self) -> list[str]:
        return [rid for rid in self.rows if self.requests[rid].state is _S.PREFILLING]

    def _change_rows(self, plan: StepPlan) -> None:
        for rid in plan.shed:
            assert rid in self.waiting
            self._end(rid, _S.ABORTED)
        for rid, tokens in plan.evict:
            self._evict(rid, tokens)
        for rid in plan.pause:
            assert self.requests[rid].info.can_pause
            self._enter(rid, _S.PAUSED)
        for rid in plan.resume:
            self._enter(rid, _S.DECODING)
        for rid in plan.park:
            self._enter(rid, _S.PARKED)

    def _begin_chunks(
        self, prefills: Sequence[PrefillChunk]
    ) -> tuple[list[tuple[int, int]], list[str]]:
        """Return the tokens and context of each chunk, and who is new."""
        for rid in self.rows:
            if self.requests[rid].state is _S.PREFILLING and rid not in dict(prefills):
                self._enter(rid, _S.PARKED)
        chunks, admitted = [], []
        for rid, tokens in prefills:
            live = self.requests[rid]
            if rid not in self.rows:
                self._admit(rid)
                admitted.append(rid)
            elif live.state is _S.PARKED:
                self._enter(rid, _S.PREFILLING)
            assert live.state is _S.PREFILLING
            assert 0 < tokens <= live.length - live.computed
            chunks.append((tokens, live.computed))
        assert len(self.rows) <= self.slots
        return chunks, admitted

    def _compute_all(
        self, decodes: Sequence[str], prefills: Sequence[PrefillChunk]
    ) -> tuple[Served, ...]:
        work = [*((rid, 1) for rid in decodes), *prefills]
        rows = [self.requests[rid] for rid, _ in work]
        before = [(live.last_token_s, live.generated) for live in rows]
        for rid, tokens in work:
            self._compute(rid, tokens)
        return tuple(
            Served(live.info, last_s, self.now_s if live.generated > generated else None)
            for live, (last_s, generated) in zip(rows, before, strict=True)
            if live.info.is_online
        )

    def _put_back(self, rid: str) -> None:
        """Let a request wait again whose admission was given up."""
        live = self.requests[rid]
        self.rows.remove(rid)
        self._enter(rid, _S.WAITING)
        live.computed = 0
        if live.info.is_online:
            self.waiting.insert(0, rid)
        else:
            self.scheduler.restore(rid, live.generated)

    def _row(self, rid: str) -> Row:
        live = self.requests[rid]
        return Row(live.info, live.state, live.generated, live.computed, 0, live.last_token_s)

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
        self.rows.append(rid)
        self._enter(rid, _S.PREFILLING)

    def _evict(self, rid: str, tokens: int) -> None:
        live = self.requests[rid]
        assert rid in self.rows
        assert 0 < tokens <= live.computed
        head = live.computed - tokens
        self.rows.remove(rid)
        self._enter(rid, _S.WAITING)
        live.computed = 0
        if head >= self.page_tokens:
            self.cache[rid] = head - head % self.page_tokens
        if live.info.is_online:
            self.waiting.insert(0, rid)
        else:
            self.scheduler.restore(rid, live.generated)

    def _compute(self, rid: str, tokens: int) -> None:
        live = self.requests[rid]
        live.computed += tokens
        while self.free_kv < 0:
            assert self.cache, "KV over capacity"
            del self.cache[next(iter(self.cache))]
        if live.computed < live.length:
            return
        if live.state is _S.PREFILLING:
            self._enter(rid, _S.DECODING)
        live.generated += 1
        live.last_token_s = self.now_s
        if live.generated >= live.info.max_new_tokens:
            self._end(rid, _S.FINISHED)

    def _end(self, rid: str, state: RequestState) -> None:
        assert rid not in self.ended, f"{rid} ends twice"
        self._enter(rid, state)
        self.ended[rid] = state
        for place in (self.rows, self.waiting):
            if rid in place:
                place.remove(rid)
        self.cache.pop(rid, None)
        if state is _S.FINISHED:
            self._finished.append(rid)  # The scheduler has yet to hear of its last token.
        else:
            self.scheduler.finish(rid)
