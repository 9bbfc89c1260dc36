"""SGLang's scheduler carrying out the plans of ``core.scheduler``.

Every pass that involves offline requests becomes an ``EngineSnapshot``; the
core answers with a ``StepPlan``; this module frees, pauses, parks and resumes
rows, and has the planned chunks admitted. Passes without offline requests are
SGLang's alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.utils import TypeBasedDispatcher

from sglang_coserve.core.baseline import Baseline
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
from sglang_coserve.core.recording import RecordingScheduler
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.scheduler import Scheduler as CoreScheduler
from sglang_coserve.core.snapshot import EngineSnapshot, Row
from sglang_coserve.core.step import PrefillChunk, StepPlan
from sglang_coserve.srt.compat import release_aborted
from sglang_coserve.srt.core_setup import make_core_scheduler
from sglang_coserve.srt.directed_scheduler import DirectedScheduler
from sglang_coserve.srt.drift_warning import DriftWarning
from sglang_coserve.srt.latency_source import latency_profile
from sglang_coserve.srt.offline_marks import deadline_of, user_of
from sglang_coserve.srt.request_marks import is_offline
from sglang_coserve.srt.step_tracker import StepTracker
from sglang_coserve.srt.ticks import Tick, TickSource

__all__ = ["PlannedScheduler"]

Req = Any
ScheduleBatch = Any


class PlannedScheduler(DirectedScheduler):
    """See the module's docstring."""

    _core: CoreScheduler | RecordingScheduler

    # State of SGLang's that is assigned here too.
    input_blocker: Any

    # --- Set-up --------------------------------------------------------------------------

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start SGLang's scheduler; then profile, with the model in place and nobody waiting."""
        super().__init__(*args, **kwargs)
        profile = latency_profile(self, self._coserve_config)
        self._core = make_core_scheduler(
            self._coserve_config, profile, records=self.ps.tp_rank == 0
        )

    def init_running_status(self) -> None:
        """Set up what is known of offline requests and of the last pass."""
        super().init_running_status()
        self._offline_reqs: dict[str, Req] = {}
        self._cooling: list[Req] = []
        self._ended: list[Req] = []
        self._has_left_decodes = False
        self._tick_s: float | None = None
        self._drift_warning = DriftWarning() if self.ps.tp_rank == 0 else None
        self._pass_s = 0.0
        self._arrival_wait_s = math.inf
        self._arrivals_s: Mapping[str, float] = {}
        self._steps = StepTracker(
            self._ledger, is_overlapped=self.enable_overlap and self.device != "cpu"
        )

    def _baseline(self) -> Baseline:
        return Baseline(
            chunk_tokens=self.chunked_prefill_size or self.max_prefill_tokens,
            max_rows=self.max_running_requests,
            kv_tokens=self.max_total_num_tokens,
            mixes_decodes=self.is_mixed_chunk,
        )

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
        self._arrivals_s = tick.arrivals_s

    def _now_s(self) -> float:
        return super()._now_s() if self._tick_s is None else self._tick_s

    def _arrival_s(self, req: Req, now_s: float) -> float:
        if self._tick_s is None:
            return super()._arrival_s(req, now_s)
        return self._arrivals_s.get(req.rid, now_s)

    # --- Requests arrive and leave -------------------------------------------------------

    def _enqueue_offline(self, req: Req) -> None:
        if req.retraction_count:
            self._cooling.append(req)
            return
        self._offline_reqs[req.rid] = req
        arrival_s = self._ledger[req.rid].arrival_s
        self._core.add_offline(
            QueuedRequest(
                rid=req.rid,
                token_ids=pack_tokens(req.origin_input_ids),
                arrival_s=arrival_s,
                max_new_tokens=req.sampling_params.max_new_tokens,
                num_generated_tokens=len(req.output_ids),
                deadline_s=deadline_of(req, arrival_s),
                user=user_of(req),
            )
        )

    def _dequeue_offline(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Forget and return the waiting and parked requests that an abort names."""
        gone = [req for req in self._cooling if matches(req)]
        self._cooling = [req for req in self._cooling if not matches(req)]
        gone += [req for req in self._offline_reqs.values() if matches(req)]
        for req in self._aside.unpark_all(matches):
            release_aborted(req, self.tree_cache)
            gone.append(req)
        self._aside.abort_paused(matches)
        for req in gone:
            self._forget(req.rid)
        return gone

    def _forget(self, rid: str) -> None:
        if rid in self._ledger:
            self._core.finish(rid)
            self._offline_reqs.pop(rid, None)
        super()._forget(rid)

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        """Note who got a token, and who ended."""
        reqs = list(batch.reqs)
        before = [len(req.output_ids) for req in reqs]
        super().process_batch_result(batch, result)
        has_token = [len(req.output_ids) > count for req, count in zip(reqs, before, strict=True)]
        self._steps.processed(reqs, has_token)
        self._ended += [req for req in reqs if req.finished()]

    # --- One scheduling pass -------------------------------------------------------------

    def get_next_batch_to_run(self, running_batch: ScheduleBatch, last_batch: Any) -> Any:
        """Note the batch that the pass ends with, planned or not."""
        result = super().get_next_batch_to_run(running_batch=running_batch, last_batch=last_batch)
        self._steps.launched(result.batch_to_run)
        return result

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> Any:
        """Let the core decide, and SGLang admit what it decided."""
        self._pass_s = now_s = self._now_s()
        self._kv.prefetch(now_s)
        self._account(now_s)
        if not self._has_offline(running_batch):
            return super().get_new_batch_prefill(running_batch)
        running_batch.filter_batch()
        running_batch = self._aside.resume_ended(running_batch)
        self._evict(self._rids_in_the_way(self._rows_with_kv(running_batch)), running_batch)
        plan = self._core.plan(self._snapshot(running_batch, now_s), self)
        running_batch = self._make_room(plan, running_batch)
        # SGLang runs decodes and prefills apart when one of them returns log-probabilities, and
        # prefills first: so that they take turns, the next prefills wait for a pass.
        chunks = [] if self._has_left_decodes else self._on_device(self._executable(plan.prefills))
        result, admitted = self._run_chunks(
            chunks, self._offline_reqs, running_batch, mixes_decodes=not plan.skips_decodes
        )
        for chunk in admitted:
            self._offline_reqs.pop(chunk.rid, None)
        batch = result.batch_to_run
        self._has_left_decodes = (
            batch is not None
            and batch.decoding_reqs is None
            and bool(running_batch.reqs)
            and not plan.skips_decodes
        )
        if batch is not None or running_batch.reqs:
            self._core.start(plan, admitted)
            self._steps.started(plan.step)
        self._arrival_wait_s = plan.arrival_wait_s
        return result

    def _has_offline(self, running_batch: ScheduleBatch) -> bool:
        if self._offline_reqs or self._cooling:
            return True
        return any(is_offline(req) for req in self._rows_with_kv(running_batch))

    def _account(self, now_s: float) -> None:
        """Close the books on the last pass: its results, ends, and cool-downs."""
        results = self._steps.next_pass(now_s)
        for result in results:
            self._core.update(result)
        if results and self._drift_warning is not None:
            self._drift_warning.check(self._core.prediction_error, now_s)
        for req in self._ended:
            self._forget(req.rid)
        self._ended = []
        self._slo_watch.advance(self._core.model, now_s)
        for req in self._cooling:
            self._core.restore(req.rid, len(req.output_ids))
            self._offline_reqs[req.rid] = req
        self._cooling = []

    # --- Engine state to snapshot --------------------------------------------------------

    def _snapshot(self, running_batch: ScheduleBatch, now_s: float) -> EngineSnapshot:
        rows = self._rows(running_batch)
        num_decodes = len(running_batch.reqs) + len(self._aside.paused)
        return EngineSnapshot(
            now_s=now_s,
            rows=rows,
            waiting=self._ledger.waiting_rows(self.waiting_queue),
            free_kv_tokens=self.token_to_kv_pool_allocator.available_size(),
            evictable_kv_tokens=self.tree_cache.evictable_size(),
            free_slots=max(0, self.get_num_allocatable_reqs(len(rows))),
            max_batch_tokens=num_decodes + (self.chunked_prefill_size or self.max_prefill_tokens),
            page_tokens=self.page_size,
        )

    def _rows(self, running_batch: ScheduleBatch) -> list[Row]:
        ledger = self._ledger
        rows = ledger.decode_rows(running_batch.reqs, RequestState.DECODING)
        rows += ledger.decode_rows(self._aside.paused, RequestState.PAUSED)
        rows += [ledger.prefill_row(req, RequestState.PARKED) for req in self._aside.parked]
        if self.chunked_req is not None:
            rows.append(ledger.prefill_row(self.chunked_req, RequestState.PREFILLING))
        return rows

    def cached_tokens(self, rid: str) -> int:
        """Return what the radix cache holds of a waiting offline request (``PrefixCache``)."""
        return self._ledger.match_prefix(self._offline_reqs[rid])

    # --- Plan to engine ------------------------------------------------------------------

    def _make_room(self, plan: StepPlan, running_batch: ScheduleBatch) -> ScheduleBatch:
        """Carry out a plan but for its prefills; a chunk that gets none is parked with those."""
        for rid in plan.shed:
            self._shed(rid)
        self._evict({eviction.rid for eviction in plan.evict}, running_batch)
        if plan.pause:
            self._aside.pause(running_batch, set(plan.pause))
            self._offline_counts["paused"] += len(plan.pause)
        self._offline_counts["resumed"] += len(plan.resume)
        return self._aside.resume(running_batch, set(plan.resume))

    def _on_device(self, chunks: list[PrefillChunk]) -> list[PrefillChunk]:
        """Leave out the offline requests whose KV is to come back from the host first."""
        waiting = self._offline_reqs
        held = self._kv.hold_back([waiting[c.rid] for c in chunks if c.rid in waiting])
        return [chunk for chunk in chunks if chunk.rid not in held]

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
            self._slo_watch.refused(rid, self._now_s())
            self._forget(rid)

    # --- What others ask about -----------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        error = self._core.prediction_error
        model = self._core.model
        return {
            **super()._state(),
            "prediction": {"model": model.kind, "mape": error.mape, "bias": error.bias},
        }

    def _latency_model(self) -> LatencyModel:
        return self._core.model

    def _num_offline_waiting(self) -> int:
        return len(self._offline_reqs) + len(self._cooling) + len(self._aside)
