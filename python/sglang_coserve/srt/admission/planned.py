"""The plans of ``core.scheduler`` carried out on SGLang's scheduler.

Every pass that involves offline requests becomes an ``EngineSnapshot``; the
core answers with a ``StepPlan``; this module frees, pauses and resumes rows, and
has the planned chunks admitted. Passes without offline requests are SGLang's alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from sglang.srt.managers.io_struct import AbortReq

from sglang_coserve.core.interference import Interference
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
from sglang_coserve.core.recording import RecordingScheduler
from sglang_coserve.core.request import Ending
from sglang_coserve.core.scheduler import Scheduler as CoreScheduler
from sglang_coserve.core.snapshot import EngineSnapshot, RequestInfo
from sglang_coserve.core.step import Lane, PrefillChunk, StepPlan, StepResult
from sglang_coserve.srt.admission.protocol import OFFLINE_EVENTS
from sglang_coserve.srt.chunk_admission import ChunkAdmission
from sglang_coserve.srt.compat import release_aborted
from sglang_coserve.srt.drift_warning import DriftWarning
from sglang_coserve.srt.engine_snapshot import snapshot_of
from sglang_coserve.srt.engine_view import EngineView
from sglang_coserve.srt.kv_checkpoint.hooks import KvCheckpointing
from sglang_coserve.srt.offline_eviction import OfflineEviction, Prefill
from sglang_coserve.srt.offline_lane import OfflineLane
from sglang_coserve.srt.offline_marks import deadline_of, user_of
from sglang_coserve.srt.rank_clock import RankClock
from sglang_coserve.srt.request_ledger import RequestLedger, ending_of
from sglang_coserve.srt.request_marks import is_offline
from sglang_coserve.srt.step_runner import StepRunner, StepTerms
from sglang_coserve.srt.step_tracker import StepTracker

__all__ = ["PlannedAdmission"]

Req = Any
ScheduleBatch = Any

_RESUME_S: Final = 1e-3
"""What it takes to suspend a step and go on with it: 1 ms on a CPU, of a prototype."""


class PlannedAdmission:
    """See the module's docstring; an ``Admission``, and the core's ``PrefixCache``."""

    event_names: tuple[str, ...] = (*OFFLINE_EVENTS, "paused", "resumed", "dropped")

    def __init__(
        self,
        scheduler: Any,
        core: CoreScheduler | RecordingScheduler,
        *,
        view: EngineView,
        eviction: OfflineEviction,
        runner: StepRunner,
        clock: RankClock,
        ledger: RequestLedger,
        checkpointing: KvCheckpointing,
        events: Counter[str],
        forget: Callable[[str, Ending], None],
    ) -> None:
        """``forget`` is called with the name of each request that has ended, and how."""
        self.core = core
        self._scheduler = scheduler
        self._view = view
        self._eviction = eviction
        self._chunks = ChunkAdmission(view, eviction, events, scheduler.page_size)
        self._runner = runner
        self._clock = clock
        self._ledger = ledger
        self._checkpointing = checkpointing
        self._events = events
        self._forget = forget
        self._steps = StepTracker(
            ledger, is_overlapped=scheduler.enable_overlap and scheduler.device != "cpu"
        )
        self._lane = self._make_lane()
        runner.lane = self._lane
        self._until_s: float | None = None
        self._drift_warning = DriftWarning() if scheduler.ps.tp_rank == 0 else None
        self._waiting: dict[str, Req] = {}
        self._cooling: list[Req] = []
        """Evicted since the last pass began; they wait again from the next one on."""

        self._ended: list[Req] = []
        self._has_left_decodes = False
        """The last batch had prefills alone, for a reason of SGLang's."""

    # --- Who waits -----------------------------------------------------------------------

    def enqueue(self, req: Req) -> None:
        """See ``Admission``."""
        if req.retraction_count:
            self._cooling.append(req)
            return
        self._waiting[req.rid] = req
        arrival_s = self._ledger[req.rid].arrival_s
        self.core.add_offline(
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

    def arrived(self, req: Req, info: RequestInfo) -> None:
        """See ``Admission``. One that failed validation is not computed."""
        self.core.arrived(info, self._ledger.match_prefix(req) if req.to_finish is None else 0)

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """See ``Admission``. Paused rows that match stay, and end when they run next."""
        gone = [req for req in self._cooling if matches(req)]
        self._cooling = [req for req in self._cooling if not matches(req)]
        gone += [req for req in self._waiting.values() if matches(req)]
        for req in self._view.aside.unpark_all(matches):
            release_aborted(req, self._scheduler.tree_cache)
            gone.append(req)
        self._view.aside.abort_paused(matches)
        if self._lane is not None:
            self._lane.abort(matches)
        for req in gone:
            self._waiting.pop(req.rid, None)
        return gone

    def num_waiting(self) -> int:
        """See ``Admission``."""
        view = self._view
        away = len(view.aside) + len(view.suspended)
        return len(self._waiting) + len(self._cooling) + away

    def forget(self, rid: str, ending: Ending) -> None:
        """See ``Admission``; to be called before the ledger forgets."""
        if rid in self._ledger:
            self.core.finish(rid, ending)
            self._waiting.pop(rid, None)

    # --- One pass ------------------------------------------------------------------------

    def admit(self, running_batch: ScheduleBatch, prefill: Prefill) -> Any:
        """Let the core decide, and SGLang admit what it decided."""
        now_s = self._clock.now_s()
        self._until_s = None
        self._checkpointing.prefetch(now_s)
        self._account(now_s)
        if not self._has_offline(running_batch):
            return prefill(running_batch)
        running_batch.filter_batch()
        running_batch = self._view.aside.resume_ended(running_batch)
        rows = self._view.rows_with_kv(running_batch)
        self._eviction.evict(self._eviction.rids_in_the_way(rows), running_batch)
        plan = self.core.plan(self._snapshot(running_batch, now_s), self)
        if plan.drops:
            self._drop()
            plan = self.core.plan(self._snapshot(running_batch, now_s), self)
        if plan.lane is Lane.OFFLINE and not plan.is_idle:
            return self._run_alone(plan, running_batch, prefill)
        running_batch = self._make_room(plan, running_batch)
        result, admitted = self._chunks.run(
            self._executable(plan),
            self._waiting,
            running_batch,
            prefill,
            mixes_decodes=not plan.skips_decodes,
        )
        for chunk in admitted:
            self._waiting.pop(chunk.rid, None)
        batch = result.batch_to_run
        self._has_left_decodes = (
            batch is not None
            and batch.decoding_reqs is None
            and bool(running_batch.reqs)
            and not plan.skips_decodes
        )
        if batch is not None or running_batch.reqs:
            self.core.start(plan, admitted)
            self._steps.started(plan.step)
        is_left_out = bool(plan.prefills and self._view.waiting)
        if batch is None and (is_left_out or not result.running_batch.reqs):
            # SGLang reserves more memory than a plan, and places for adapters: a suspended step
            # must not hold what an online request waits for, while it waits for that request.
            self.give_up()
        return result

    def _make_lane(self) -> OfflineLane | None:
        safepoints = self._runner.safepoints
        if safepoints is None:
            return None
        return OfflineLane(
            self._scheduler,
            self._view,
            self._chunks,
            self._runner.counted_penalties,
            safepoints.num_layers,
            self._events,
        )

    def _run_alone(self, plan: StepPlan, running_batch: ScheduleBatch, prefill: Prefill) -> Any:
        """Let a step of the offline lane begin, or go on."""
        lane = self._lane
        assert lane is not None
        self._until_s = plan.until_s
        if plan.resumes:
            self._steps.resumed()
            return lane.resume(running_batch)
        self._eviction.evict({eviction.rid for eviction in plan.evict}, running_batch)
        chunks = self._executable(plan)
        result, admitted = lane.prepare(plan, chunks, self._waiting, running_batch, prefill)
        if result.batch_to_run is None:
            self._until_s = None
            return result
        for chunk in admitted:
            self._waiting.pop(chunk.rid, None)
        self.core.start(plan, admitted)
        self._steps.started(plan.step)
        return result

    def _drop(self) -> None:
        lane = self._lane
        assert lane is not None
        self.core.update(self._steps.dropped(lane.drop()))
        self._events["dropped"] += 1

    def settle(self, last_batch: Any) -> Any:
        """See ``Admission``."""
        return last_batch if self._lane is None else self._lane.settle(last_batch)

    def give_up(self) -> None:
        """See ``Admission``."""
        if self._lane is not None and self._lane.suspended is not None:
            self._drop()

    def launched(self, batch: ScheduleBatch | None) -> None:
        """See ``Admission``: planned or not."""
        self._steps.launched(batch)

    @property
    def terms(self) -> StepTerms | None:
        """See ``Admission``."""
        return None if self._until_s is None else StepTerms(self._until_s, self._steps.suspended)

    def stopped(self) -> None:
        """See ``Admission``: it was suspended."""
        self._steps.processed((), ())

    def processed(self, reqs: Sequence[Req], has_token: Sequence[bool]) -> None:
        """See ``Admission``. Who ended is forgotten when the next pass begins."""
        self._steps.processed(reqs, has_token)
        self._ended += [req for req in reqs if req.finished()]

    def _account(self, now_s: float) -> None:
        """Close the books on the last pass: its results, ends, and cool-downs."""
        results = self._steps.next_pass(now_s)
        if not results and len(self.core.interference):
            # Nothing ran, but the baseline goes on: it may be behind.
            results = [StepResult(None, now_s)]
        for result in results:
            self.core.update(result)
        if results and self._drift_warning is not None:
            self._drift_warning.check(self.core.prediction_error, now_s)
        for req in self._ended:
            self._forget(req.rid, ending_of(req))
        self._ended = []
        for req in self._cooling:
            self.core.restore(req.rid, len(req.output_ids))
            self._waiting[req.rid] = req
        self._cooling = []

    def _has_offline(self, running_batch: ScheduleBatch) -> bool:
        if self._waiting or self._cooling:
            return True
        return any(is_offline(req) for req in self._view.rows_with_kv(running_batch))

    # --- Engine state to plan ------------------------------------------------------------

    def _snapshot(self, running_batch: ScheduleBatch, now_s: float) -> EngineSnapshot:
        return snapshot_of(
            self._scheduler,
            self._view,
            self._ledger,
            running_batch,
            now_s,
            suspended=None if self._lane is None else self._lane.seen(),
            stop_share=self._runner.stop_share,
            decodes_stop=self._runner.decodes_stop,
            resume_s=_RESUME_S,
        )

    def cached_tokens(self, rid: str) -> int:
        """Return what the radix cache holds of a waiting offline request (``PrefixCache``)."""
        return self._ledger.match_prefix(self._waiting[rid])

    # --- Plan to engine ------------------------------------------------------------------

    def _make_room(self, plan: StepPlan, running_batch: ScheduleBatch) -> ScheduleBatch:
        """Carry out a plan but for its prefills; a chunk that gets none is parked with those."""
        for rid in plan.shed:
            self._shed(rid)
        self._eviction.evict({eviction.rid for eviction in plan.evict}, running_batch)
        if plan.pause:
            self._view.aside.pause(running_batch, set(plan.pause))
            self._events["paused"] += len(plan.pause)
        self._events["resumed"] += len(plan.resume)
        return self._view.aside.resume(running_batch, set(plan.resume))

    def _executable(self, plan: StepPlan) -> list[PrefillChunk]:
        """Return the planned chunks that SGLang can run now."""
        if self._has_left_decodes:
            # SGLang runs decodes and prefills apart when one of them returns log-probabilities,
            # and prefills first: so that they take turns, the next prefills wait for a pass.
            return []
        chunks = self._chunks.executable(plan.prefills)
        # The KV of some is to come back from the host first.
        waiting = self._waiting
        held = self._checkpointing.hold_back([waiting[c.rid] for c in chunks if c.rid in waiting])
        return [chunk for chunk in chunks if chunk.rid not in held]

    def _shed(self, rid: str) -> None:
        for req in self._view.remove_waiting(rid):
            reason = {
                "type": "abort",
                "status_code": 503,
                "message": "The server is overloaded: the request cannot meet its TTFT target.",
            }
            self._scheduler.ipc_channels.send_to_tokenizer.send_output(
                AbortReq(rid=rid, finished_reason=reason), req
            )
            self._forget(rid, Ending.REFUSED)

    # --- What others ask about -----------------------------------------------------------

    @property
    def interference(self) -> Interference:
        """See ``Admission``."""
        return self.core.interference

    def latency_model(self) -> LatencyModel:
        """See ``Admission``."""
        return self.core.model

    def state(self) -> dict[str, Any]:
        """See ``Admission``."""
        error, model = self.core.prediction_error, self.core.model
        return {"prediction": {"model": model.kind, "mape": error.mape, "bias": error.bias}}
