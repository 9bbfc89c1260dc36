"""SGLang's scheduler carrying out the plans of ``core.scheduler``.

Every pass that involves offline requests becomes an ``EngineSnapshot``; the
core answers with a ``StepPlan``; this module frees, pauses, parks, resumes and
offers rows to SGLang's own admission so that the batch it builds is the planned
one.  Passes without offline requests are SGLang's alone.

What SGLang cannot do is left out of a plan, never imitated: it runs one
unfinished prefill at a time, and runs it first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.utils import TypeBasedDispatcher

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
from sglang_coserve.core.request import RequestClass, RequestState
from sglang_coserve.core.scheduler import Scheduler as CoreScheduler
from sglang_coserve.core.snapshot import EngineSnapshot, PrefillChunk, RequestInfo, Row, StepPlan
from sglang_coserve.srt.compat import release_aborted
from sglang_coserve.srt.core_setup import make_core_scheduler
from sglang_coserve.srt.request_class import is_offline
from sglang_coserve.srt.row_groups import has_plain_state, join, split
from sglang_coserve.srt.scheduler import CoserveScheduler
from sglang_coserve.srt.ticks import Tick, TickSource

__all__ = ["PlannedScheduler"]

Req = Any
ScheduleBatch = Any

_MATCHED_WAITING = 8
"""Waiting online requests whose cached prefix is looked up each pass; the others count as new."""


class PlannedScheduler(CoserveScheduler):
    """See the module's docstring."""

    _count_names = (*CoserveScheduler._count_names, "paused", "resumed")

    # State of SGLang's that is assigned here too.
    chunked_prefill_size: int | None
    input_blocker: Any
    is_mixed_chunk: bool

    # --- Set-up --------------------------------------------------------------------------

    def init_running_status(self) -> None:
        """Set up the core scheduler and the rows that hold KV outside SGLang's batches."""
        super().init_running_status()
        self._core: CoreScheduler = make_core_scheduler(self._coserve_config)
        self._offline_reqs: dict[str, Req] = {}
        self._cooling: list[Req] = []
        self._parked: dict[str, Req] = {}
        self._paused: ScheduleBatch | None = None
        self._infos: dict[str, RequestInfo] = {}
        self._last_token_s: dict[str, float] = {}
        self._produced: list[Req] = []
        self._tick_s: float | None = None
        self._launched: tuple[float, BatchStats] | None = None

    def init_watch_dog_memory_saver_input_blocker(self) -> None:
        """Broadcast rank 0's clock where there are several ranks."""
        super().init_watch_dog_memory_saver_input_blocker()
        if self.ps.tp_size > 1:
            self.input_blocker = TickSource(self.input_blocker, is_source=self.ps.tp_rank == 0)

    def init_request_dispatcher(self) -> None:
        """Take ticks from the broadcast."""
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher([(Tick, self._on_tick)])

    def _on_tick(self, tick: Tick) -> None:
        self._tick_s = tick.now_s

    def _now_s(self) -> float:
        return time.perf_counter() if self._tick_s is None else self._tick_s

    # --- Requests arrive and leave -------------------------------------------------------

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        if req.rid not in self._infos:
            self._infos[req.rid] = self._info_of(req)
        super()._add_request_to_queue(req, is_retracted)

    def _enqueue_offline(self, req: Req) -> None:
        if req.retraction_count:
            self._cooling.append(req)
            return
        self._offline_reqs[req.rid] = req
        self._core.add_offline(
            QueuedRequest(
                rid=req.rid,
                token_ids=pack_tokens(req.origin_input_ids),
                arrival_s=self._infos[req.rid].arrival_s,
                max_new_tokens=req.sampling_params.max_new_tokens,
            )
        )

    def _info_of(self, req: Req) -> RequestInfo:
        return RequestInfo(
            rid=req.rid,
            # One that failed validation takes SGLang's way out, as an online one.
            request_class=(
                RequestClass.OFFLINE
                if is_offline(req) and req.to_finish is None
                else RequestClass.ONLINE
            ),
            prompt_tokens=len(req.origin_input_ids),
            max_new_tokens=req.sampling_params.max_new_tokens,
            arrival_s=self._now_s(),
            can_pause=has_plain_state(req),
        )

    def _dequeue_offline(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Forget and return the waiting and parked requests that an abort names."""
        gone = [req for req in self._cooling if matches(req)]
        self._cooling = [req for req in self._cooling if not matches(req)]
        gone += [req for req in self._offline_reqs.values() if matches(req)]
        for req in [req for req in self._parked.values() if matches(req)]:
            del self._parked[req.rid]
            release_aborted(req, self.tree_cache)
            gone.append(req)
        for req in self._paused.reqs if self._paused is not None else ():
            if matches(req) and not req.finished():
                req.to_finish = FINISH_ABORT()  # It ends when it runs next, which is at once.
        for req in gone:
            self._forget(req.rid)
        return gone

    def _forget(self, rid: str) -> None:
        if self._infos.pop(rid, None) is not None:
            self._core.finish(rid)
            self._offline_reqs.pop(rid, None)
            self._last_token_s.pop(rid, None)

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        """Note who got a token, and who ended."""
        super().process_batch_result(batch, result)
        self._produced += batch.reqs

    # --- One scheduling pass -------------------------------------------------------------

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> Any:
        """Let the core decide, and SGLang admit what it decided."""
        now_s = self._now_s()
        self._account(now_s)
        if not self._has_offline(running_batch):
            return super().get_new_batch_prefill(running_batch)
        running_batch.filter_batch()
        running_batch = self._resume_aborted(running_batch)
        plan = self._core.plan(self._snapshot(running_batch, now_s), self)
        running_batch = self._make_room(plan, running_batch)
        chunks = self._executable(plan)
        result, admitted = self._run_chunks(chunks, running_batch)
        self._core.commit(replace(plan, prefills=admitted))
        self._launched = (now_s, plan.batch) if len(admitted) == len(plan.prefills) else None
        return result

    def _has_offline(self, running_batch: ScheduleBatch) -> bool:
        if self._offline_reqs or self._cooling or self._parked or self._paused is not None:
            return True
        return any(is_offline(req) for req in running_batch.reqs)

    def _account(self, now_s: float) -> None:
        """Close the books on the last pass: tokens, ends, its latency, and cool-downs."""
        for req in self._produced:
            if req.finished():
                self._forget(req.rid)
            elif req.output_ids:
                self._last_token_s[req.rid] = now_s
        self._produced = []
        if self._launched is not None and self.last_batch is not None:
            started_s, stats = self._launched
            if not stats.is_empty and now_s > started_s:
                self._core.observe(stats, now_s - started_s)
        self._launched = None
        for req in self._cooling:
            self._core.restore(req.rid, len(req.output_ids))
            self._offline_reqs[req.rid] = req
        self._cooling = []

    def _resume_aborted(self, running_batch: ScheduleBatch) -> ScheduleBatch:
        if self._paused is None:
            return running_batch
        self._paused.filter_batch()  # Under overlap the last token may end a paused request.
        aborted = {req.rid for req in self._paused.reqs if req.to_finish is not None}
        return self._resume(running_batch, aborted)

    def _resume(self, running_batch: ScheduleBatch, rids: set[str]) -> ScheduleBatch:
        assert self._paused is not None
        if rids:
            running_batch = join(running_batch, split(self._paused, rids))
        if not self._paused.reqs:
            self._paused = None
        return running_batch

    # --- Engine state to snapshot --------------------------------------------------------

    def _snapshot(self, running_batch: ScheduleBatch, now_s: float) -> EngineSnapshot:
        rows = list(self._rows(running_batch))
        return EngineSnapshot(
            now_s=now_s,
            rows=rows,
            waiting=[self._waiting_row(i, req) for i, req in enumerate(self.waiting_queue)],
            free_kv_tokens=self.token_to_kv_pool_allocator.available_size(),
            evictable_kv_tokens=self.tree_cache.evictable_size(),
            free_slots=max(0, self.get_num_allocatable_reqs(len(rows))),
            max_batch_tokens=len(rows) + (self.chunked_prefill_size or self.max_prefill_tokens),
            page_tokens=self.page_size,
        )

    def _rows(self, running_batch: ScheduleBatch) -> Iterator[Row]:
        for req in running_batch.reqs:
            yield self._decode_row(req, RequestState.DECODING)
        for req in self._paused.reqs if self._paused is not None else ():
            yield self._decode_row(req, RequestState.PAUSED)
        for req in self._parked.values():
            yield self._prefill_row(req, RequestState.PARKED)
        if self.chunked_req is not None:
            yield self._prefill_row(self.chunked_req, RequestState.PREFILLING)

    def _decode_row(self, req: Req, state: RequestState) -> Row:
        info = self._infos[req.rid]
        # Counts a token still in flight under overlap scheduling: its KV is taken already.
        computed = req.kv_committed_len
        generated = computed + 1 - info.prompt_tokens
        return Row(info, state, generated, computed, 0, self._last_token_s.get(req.rid))

    def _prefill_row(self, req: Req, state: RequestState) -> Row:
        computed = len(req.prefix_indices)
        last_s = self._last_token_s.get(req.rid)
        return Row(self._infos[req.rid], state, len(req.output_ids), computed, 0, last_s)

    def _waiting_row(self, position: int, req: Req) -> Row:
        cached = 0
        if position < _MATCHED_WAITING:
            req.init_next_round_input(self.tree_cache)
            cached = len(req.prefix_indices)
        last_s = self._last_token_s.get(req.rid)
        return Row(
            self._infos[req.rid], RequestState.WAITING, len(req.output_ids), 0, cached, last_s
        )

    def cached_tokens(self, rid: str) -> int:
        """Return what the radix cache holds of a waiting offline request (``PrefixCache``)."""
        req = self._offline_reqs[rid]
        req.init_next_round_input(self.tree_cache)
        return len(req.prefix_indices)

    # --- Plan to engine ------------------------------------------------------------------

    def _make_room(self, plan: StepPlan, running_batch: ScheduleBatch) -> ScheduleBatch:
        """Carry out a plan but for its prefills; a chunk that gets none is parked with those."""
        for rid in plan.shed:
            self._shed(rid)
        evicted = {eviction.rid for eviction in plan.evict}
        for rid in evicted & self._parked.keys():
            self._evict_parked(rid)
        if self.chunked_req is not None and self.chunked_req.rid in evicted:
            req, self.chunked_req = self.chunked_req, None
            self._release(req)
            self._offline_counts["evicted"] += 1
        for batch in (running_batch, self._paused):
            if batch is not None and evicted:
                self._evict_rows(batch, evicted)
        if plan.pause:
            self._paused = join(self._paused, split(running_batch, set(plan.pause)))
            self._offline_counts["paused"] += len(plan.pause)
        if self._paused is not None:
            running_batch = self._resume(running_batch, set(plan.resume))
            self._offline_counts["resumed"] += len(plan.resume)
        return running_batch

    def _park_chunk(self) -> None:
        req = self.chunked_req
        assert req is not None
        if req is self._pending_chunked_abort_req:
            return
        self._parked[req.rid] = req
        self.chunked_req = None
        self._offline_counts["parked"] += 1

    def _executable(self, plan: StepPlan) -> list[PrefillChunk]:
        """Return the leading chunks that SGLang can run in one pass: an unfinished prefill
        only in front, and nothing behind a second one."""
        begun = set(self._parked)
        if self.chunked_req is not None:
            begun.add(self.chunked_req.rid)
        chunks: list[PrefillChunk] = []
        for i, chunk in enumerate(plan.prefills):
            if chunk.rid in begun and i > 0:
                break
            chunks.append(chunk)
        return chunks

    def _run_chunks(
        self, chunks: list[PrefillChunk], running_batch: ScheduleBatch
    ) -> tuple[Any, tuple[PrefillChunk, ...]]:
        """Offer exactly the planned chunks to SGLang; return its plan and what it admitted."""
        if self.chunked_req is not None and self.chunked_req.rid not in {c.rid for c in chunks}:
            self._park_chunk()
        if chunks and chunks[0].rid in self._parked:
            assert self.chunked_req is None
            self.chunked_req = self._parked.pop(chunks[0].rid)
        online = {req.rid: req for req in self.waiting_queue}
        chosen = [online.get(c.rid) or self._offline_reqs.get(c.rid) for c in chunks]
        shown = [req for req in chosen if req is not None]
        hidden = [req for req in self.waiting_queue if req not in shown]
        self._offered = [req for req in shown if req.rid not in online]
        self.waiting_queue = shown
        result = self._admit_mixed(running_batch, sum(chunk.tokens for chunk in chunks))
        left = {req.rid for req in (*self._withdraw_offer(), *self.waiting_queue)}
        # What the pass left over, what it was not shown, and what arrived meanwhile.
        self.waiting_queue = sorted(
            [*self.waiting_queue, *hidden], key=lambda req: req.time_stats.wait_queue_entry_time
        )
        if result.batch_to_run is None:
            return result, ()
        _correct_mixed_prefix_lens(result.batch_to_run)
        admitted = tuple(chunk for chunk in chunks if chunk.rid not in left)
        for chunk in admitted:
            self._offline_reqs.pop(chunk.rid, None)
        return result, admitted

    def _admit_mixed(self, running_batch: ScheduleBatch, tokens: int) -> Any:
        """Let SGLang build a mixed batch of ``tokens`` prefill tokens and all decodes."""
        size, mixed = self.chunked_prefill_size, self.is_mixed_chunk
        running_batch.batch_is_full = False
        try:
            self.is_mixed_chunk = True
            # SGLang takes the decodes of a mixed batch off the size of the chunk.
            self.chunked_prefill_size = max(tokens, self.page_size) + len(running_batch.reqs)
            # It may evict: SGLang also reserves room for a request's output, a plan does not.
            return self._admit(running_batch)
        finally:
            self.chunked_prefill_size, self.is_mixed_chunk = size, mixed

    def _shed(self, rid: str) -> None:
        for req in [req for req in self.waiting_queue if req.rid == rid]:
            self.waiting_queue.remove(req)
            reason = {
                "type": "abort",
                "status_code": 503,
                "message": "The server is overloaded: the request cannot meet its TTFT target.",
            }
            self.ipc_channels.send_to_tokenizer.send_output(
                AbortReq(rid=rid, finished_reason=reason), req
            )
            self._forget(rid)

    # --- Memory --------------------------------------------------------------------------

    def _evict_offline(self, running_batch: ScheduleBatch) -> bool:
        """Release one offline row that a plan left in memory: parked, paused, then running."""
        if self._parked:
            self._evict_parked(next(reversed(self._parked)))
        elif self._paused is not None and self._paused.reqs:
            self._evict_rows(self._paused, {self._paused.reqs[-1].rid})
            if not self._paused.reqs:
                self._paused = None
        else:
            return super()._evict_offline(running_batch)
        running_batch.batch_is_full = False
        return True

    def _evict_parked(self, rid: str) -> None:
        self._release(self._parked.pop(rid))
        self._offline_counts["evicted"] += 1

    # --- What SGLang asks about ----------------------------------------------------------

    def init_invariant_checker(self) -> None:
        """Let the memory check of a busy engine count parked and paused rows."""
        super().init_invariant_checker()
        self.invariant_checker.get_running_batch = lambda: _HeldRows(list(self._held_reqs()))

    def _held_reqs(self) -> Iterator[Req]:
        """Requests that hold KV and are not in the last batch, which SGLang counts itself."""
        counted = {id(req) for req in self.last_batch.reqs} if self.last_batch else set()
        paused = self._paused.reqs if self._paused is not None else ()
        chunked = () if self.chunked_req is None else (self.chunked_req,)
        for req in (*self.running_batch.reqs, *paused, *self._parked.values(), *chunked):
            if id(req) not in counted:
                counted.add(id(req))
                yield req

    def _num_offline_waiting(self) -> int:
        held = len(self._paused.reqs) if self._paused is not None else 0
        return len(self._offline_reqs) + len(self._cooling) + len(self._parked) + held

    def pause_generation(self, recv_req: Any) -> None:
        """Let SGLang retract parked and paused requests with the running ones."""
        if recv_req.mode != "in_place":
            held = [*self._parked.values(), *(self._paused.reqs if self._paused else ())]
            self._parked, self._paused = {}, None
            self.running_batch.reqs = self.running_batch.reqs + held
        super().pause_generation(recv_req)


@dataclass(frozen=True, slots=True)
class _HeldRows:
    """What SGLang's memory check takes for the running batch."""

    reqs: list[Req]

    def is_empty(self) -> bool:
        return not self.reqs


def _correct_mixed_prefix_lens(batch: ScheduleBatch) -> None:
    """SGLang takes for granted that every decode of a mixed batch has a token in flight under
    overlap scheduling; one that sat out an iteration has none. Its context is its length - 1."""
    if not batch.forward_mode.is_mixed():
        return
    count = len(batch.decoding_reqs)
    if count:
        lens = (batch.seq_lens_cpu[-count:] - 1).tolist()
        batch.prefix_lens = [*batch.prefix_lens[:-count], *lens]
