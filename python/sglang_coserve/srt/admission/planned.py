"""The plans of ``core.scheduler`` carried out on SGLang's scheduler.

Every pass that involves offline requests becomes an ``EngineSnapshot``; the core answers
with a ``StepPlan``, which ``PlanExecution`` carries out. Passes without offline requests are
SGLang's alone, unless the order or the overload of online requests is the core's, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

from sglang_coserve.core.advisory import Advisory
from sglang_coserve.core.control.interference import Interference
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
from sglang_coserve.core.recording import RecordingScheduler
from sglang_coserve.core.request import Ending, RequestClass
from sglang_coserve.core.scheduler import Scheduler as CoreScheduler
from sglang_coserve.core.snapshot import EngineSnapshot, RequestInfo
from sglang_coserve.core.step import Lane, StepPlan, StepResult
from sglang_coserve.srt.admission.drift_warning import DriftWarning
from sglang_coserve.srt.admission.fifo_pass import FifoPass
from sglang_coserve.srt.admission.plan_execution import PlanExecution
from sglang_coserve.srt.admission.planned_waiting import PlannedWaiting, queued_request
from sglang_coserve.srt.admission.protocol import OFFLINE_EVENTS
from sglang_coserve.srt.admission.unplanned import NotedPass, UnplannedPasses
from sglang_coserve.srt.compat import is_first_rank, refuse, release_aborted, settings_of
from sglang_coserve.srt.kv_checkpoint.hooks import KvCheckpointing
from sglang_coserve.srt.marks.request_marks import is_offline
from sglang_coserve.srt.steps.batch_results import BatchResults
from sglang_coserve.srt.steps.clocks import RankClock, device_timer
from sglang_coserve.srt.steps.engine_snapshot import snapshot_of
from sglang_coserve.srt.steps.engine_view import EngineView
from sglang_coserve.srt.steps.kv_pools import KvPools
from sglang_coserve.srt.steps.offline_retraction import OfflineRetraction, Prefill
from sglang_coserve.srt.steps.request_ledger import RequestLedger, ending_of
from sglang_coserve.srt.steps.step_runner import StepRunner, StepTerms
from sglang_coserve.srt.steps.step_tracker import StepTracker

__all__ = ["PlannedAdmission"]

Req = Any
ScheduleBatch = Any

FailedPlan = Callable[[Iterable[QueuedRequest], EngineSnapshot, Mapping[str, int | None]], None]
"""Takes what a plan that failed was made from: the waiting offline requests, the engine, and what
its cache holds of them."""

_RESUME_S: Final = 1.6e-3
"""The cost of suspending and resuming a step, in seconds, until one has shown it: the median on a
CPU (tag ``measurements-1``)."""


class PlannedAdmission:
    """See the module's docstring; an ``Admission``, and the core's ``PrefixCache``."""

    event_names: tuple[str, ...] = (*OFFLINE_EVENTS, "paused", "resumed", "dropped")

    def __init__(
        self,
        scheduler: Any,
        core: CoreScheduler | RecordingScheduler,
        *,
        pools: KvPools,
        view: EngineView,
        retraction: OfflineRetraction,
        runner: StepRunner,
        clock: RankClock,
        ledger: RequestLedger,
        checkpointing: KvCheckpointing,
        events: Counter[str],
        advisory: Advisory,
        forget: Callable[[Req, Ending], None],
        answer_aborted: Callable[[Req], None],
        plans_online: bool,
        most_offline: int | None,
        failed_plans: FailedPlan | None,
    ) -> None:
        """Admit nothing yet.

        ``forget`` is called with each request that has ended, and how, and ``answer_aborted``
        with those that are aborted in no batch.
        ``plans_online`` has the core plan passes without offline requests, too. ``most_offline`` is
        how many offline requests may run without a plan. ``failed_plans`` writes down what plans
        were made from that failed.
        """
        self.core = core
        self._scheduler = scheduler
        self._pools = pools
        self._view = view
        self._retraction = retraction
        self._runner = runner
        self._clock = clock
        clock.timer = runner.timer = device_timer(scheduler)
        self._ledger = ledger
        self._checkpointing = checkpointing
        self._events = events
        self._tell = advisory.tell
        self._write_failed = failed_plans
        self._forget = forget
        self._plans_online = plans_online
        # Looking a setting up takes as long as much of a plan.
        self._keeps_prefixes = not settings_of(scheduler.server_args).disable_radix_cache
        self._steps = StepTracker(
            ledger,
            is_overlapped=runner.timer is not None,
            micro_batches=view.micro_batches,
        )
        self._until_s: float | None = None
        self.budget_s: float | None = math.inf
        self._drift_warning = DriftWarning() if is_first_rank(scheduler) else None
        self._waiting = PlannedWaiting(view.passes_to_settle)
        self._ended: list[Req] = []
        self._plans = PlanExecution(
            scheduler,
            view=view,
            retraction=retraction,
            runner=runner,
            checkpointing=checkpointing,
            events=events,
            waiting=self._waiting.reqs,
            refuse=self._refuse,
            answer_aborted=answer_aborted,
        )
        self._lane = self._plans.lane
        self._plan = StepPlan()
        """The plan of this pass."""

        self._planned_from: EngineSnapshot | None = None
        self._answers: dict[str, int | None] = {}
        """What the core was told, for the last plan, that the cache holds."""

        self._unplanned = UnplannedPasses(
            FifoPass(
                scheduler,
                most_offline,
                pools=pools,
                view=view,
                retraction=retraction,
                events=events,
                waiting=self._waiting,
            ),
            view=view,
            retraction=retraction,
            ledger=ledger,
            lane=self._lane,
            advisory=advisory,
            write=self._write_plan,
        )

    # --- Who waits -----------------------------------------------------------------------

    def enqueue(self, req: Req) -> None:
        """See ``Admission``."""
        if req.retraction_count:
            self._waiting.put_back(req)
            return
        self._waiting.reqs[req.rid] = req
        if not self._unplanned.are_all:
            self._told(self._add, queued_request(req, self._ledger[req.rid].arrival_s))

    def _add(self, request: QueuedRequest) -> None:
        """Tell the core of a new offline request, and what is cached of one unlike all others."""
        self.core.add_offline(request)
        if self.core.queue.opens_branch(request.rid):
            self._report_cached(request.rid)

    def arrived(self, req: Req, info: RequestInfo) -> None:
        """See ``Admission``. One that failed validation is not computed."""
        cached_tokens = self._ledger.match_prefix(req) if req.to_finish is None else 0
        self._tell("judgement", self.core.arrived, info, cached_tokens)

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """See ``Admission``. Paused requests that match stay, and end when they run next."""
        gone = self._waiting.remove(matches)
        for req in self._view.paused_requests.unpark_all(matches):
            release_aborted(req, self._scheduler.tree_cache)
            gone.append(req)
        self._view.paused_requests.abort_paused(matches)
        if self._lane is not None:
            self._lane.abort(matches)
        return gone

    def num_waiting(self) -> int:
        """See ``Admission``."""
        view = self._view
        return len(self._waiting) + len(view.paused_requests) + len(view.suspended)

    def take_launched(self) -> list[Req]:
        """See ``Admission``."""
        return [] if self._lane is None else self._lane.take_launched()

    def num_running(self) -> int:
        """See ``Admission``."""
        return 0 if self._lane is None else self._lane.num_running

    def kept(self) -> Iterable[Req]:
        """See ``Admission``."""
        return (*self._waiting, *self._ended)

    def forget(self, rid: str, ending: Ending) -> None:
        """See ``Admission``; to be called before the ledger forgets."""
        if self._unplanned.are_all:
            self._tell("judgement", self.core.interference.ended, rid, ending)
        else:
            self._told(self.core.finish, rid, ending)
        self._waiting.reqs.pop(rid, None)

    # --- One pass ------------------------------------------------------------------------

    def admit(self, running_batch: ScheduleBatch, prefill: Prefill) -> Any:
        """Ask the core for a plan, and have SGLang admit it."""
        now_s = self._clock.now_s()
        if self._runner.timer is not None:
            self._runner.timer.begin_pass()
        self._until_s = None
        self._checkpointing.prefetch(now_s)
        self._account(now_s)
        if not self._is_planned(running_batch):
            self._steps.decided(self._clock.now_s())
            return prefill(running_batch)
        running_batch.filter_batch()
        running_batch = self._view.paused_requests.resume_ended(running_batch)
        if self._unplanned.are_all:
            return self._unplanned.admit(running_batch, prefill)
        tried = NotedPass(prefill)
        self._plan = StepPlan()
        try:
            result = self._admit(running_batch, tried, now_s)
        except Exception as error:
            self._until_s = None
            self._unplanned.failed(error, tried)
            is_alone = self._plan.lane is Lane.OFFLINE
            result = self._unplanned.recover(running_batch, tried, is_alone=is_alone)
            for req in () if result.batch_to_run is None else result.batch_to_run.reqs:
                self._waiting.reqs.pop(req.rid, None)
            return result
        self._unplanned.planned()
        return result

    def _admit(self, running_batch: ScheduleBatch, prefill: Prefill, now_s: float) -> Any:
        requests = self._view.requests_with_kv(running_batch)
        in_the_way = self._retraction.rids_blocking_adapters(requests)
        if any(req.rid in in_the_way for req in self._view.suspended):
            self._drop()
        self._retraction.retract(in_the_way, running_batch)
        plan = self._new_plan(running_batch, now_s)
        # A step that does not go on now would hold what clients have left for as long as it waits.
        has_left = any(req.to_finish is not None for req in self._view.suspended)
        if plan.drops or (has_left and not plan.resumes):
            self._drop()
            plan = self._new_plan(running_batch, now_s)
        self._plan = plan
        self._steps.decided(self._clock.now_s())
        if math.isfinite(plan.budget_s):
            self.budget_s = plan.budget_s
        executed = self._plans.carry_out(plan, running_batch, prefill)
        for chunk in executed.admitted:
            self._waiting.reqs.pop(chunk.rid, None)
        for rid in executed.refused:
            # No request will end and make room: what holds the memory may be a load that hangs.
            self._told(self.core.no_room, rid)
        if plan.resumes:
            self._steps.resumed()
        elif executed.is_started:
            self.core.start(plan, executed.admitted)
            self._steps.started(plan.step)
        result = executed.result
        if result.batch_to_run is not None:
            self._until_s = plan.until_s if plan.lane is Lane.OFFLINE else None
        elif plan.lane is Lane.SHARED or plan.is_idle:
            is_left_out = bool(plan.prefills and self._view.waiting)
            if is_left_out or not result.running_batch.reqs:
                # SGLang reserves more memory than a plan, and places for adapters: a suspended
                # step must not hold what an online request waits for, while it waits for that
                # request.
                self.give_up()
        return result

    def _new_plan(self, running_batch: ScheduleBatch, now_s: float) -> StepPlan:
        assert not self._unplanned.are_all, "the core has lost track of what runs"
        self._planned_from, self._answers = self._snapshot(running_batch, now_s), {}
        return self.core.plan(self._planned_from, self)

    def _write_plan(self) -> None:
        if self._write_failed is not None and self._planned_from is not None:
            waiting = self.core.queue.candidates(self._planned_from.now_s)
            self._write_failed(waiting, self._planned_from, self._answers)

    def _told(self, call: Callable[..., None], *args: Any) -> None:
        """Tell the core what has become of requests and steps; if it fails, it plans no more.

        Whatever is asked of it within a pass is guarded by ``admit``.
        """
        if self._unplanned.are_all:
            return
        try:
            call(*args)
        except Exception as error:
            self._unplanned.end_planning(error)

    def _drop(self) -> None:
        assert self._lane is not None
        self._told(self.core.update, self._steps.dropped(self._lane.drop()))
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

    def processed(self, results: BatchResults) -> None:
        """See ``Admission``. Requests that ended are forgotten when the next pass begins."""
        self._steps.processed(results.reqs, results.has_token)
        self._ended += results.ended
        if self._waiting.reqs and not self._unplanned.are_all:
            for req in results.first_online:
                self._tell("shared prefixes", self._report_left, req)

    def _report_left(self, req: Req) -> None:
        """Tell the core of an offline request that can use the prompt of an online one."""
        waiting = self.core.queue.nearest(pack_tokens(req.origin_input_ids))
        if waiting is not None and waiting.rid in self._waiting.reqs:
            self._report_cached(waiting.rid)

    def _report_cached(self, rid: str) -> None:
        if cached_tokens := self._ledger.match_prefix(self._waiting.reqs[rid]):
            self.core.cached(rid, cached_tokens)

    def _account(self, now_s: float) -> None:
        """Process the last pass: its results, ended requests and cool-downs."""
        results = self._steps.next_pass(now_s, self._clock.take_parts())
        if not results and len(self.core.interference):
            # Nothing ran, but the baseline goes on: it may be behind.
            results = [StepResult(None, now_s)]
        for result in results:
            if self._unplanned.are_all:
                self._tell("judgement", self.core.update, replace(result, step=None))
            else:
                self._told(self.core.update, result)
        if results and self._drift_warning is not None:
            check = self._drift_warning.check
            self._tell("drift warning", check, self.core.prediction_error, now_s)
        for req in self._ended:
            self._forget(req, ending_of(req.finished_reason.to_json()))
        self._ended = []
        for req in self._waiting.start_pass():
            self._told(self.core.restore, req.rid, len(req.output_ids))

    def _is_planned(self, running_batch: ScheduleBatch) -> bool:
        # A suspended or paused step counts even if all of its requests have ended meanwhile.
        if self.num_waiting() or (self._plans_online and self._view.waiting):
            return True
        if self._plans_online and (running_batch.reqs or self._view.chunk is not None):
            return True
        if not self._ledger.totals(RequestClass.OFFLINE).requests:
            return False
        return any(is_offline(req) for req in self._view.requests_with_kv(running_batch))

    def _snapshot(self, running_batch: ScheduleBatch, now_s: float) -> EngineSnapshot:
        return snapshot_of(
            self._scheduler,
            self._pools,
            self._view,
            self._ledger,
            running_batch,
            now_s,
            keeps_prefixes=self._keeps_prefixes,
            suspended=None if self._lane is None else self._lane.seen(),
            stop_share=self._runner.stop_share,
            decodes_stop=self._runner.decodes_stop,
            resume_s=_RESUME_S,
        )

    def cached_tokens(self, rid: str) -> int | None:
        """See ``PrefixCache``."""
        req = self._waiting.reqs[rid]
        is_held = self._checkpointing.is_held_back(req)
        tokens = self._answers[rid] = None if is_held else self._ledger.match_prefix(req)
        return tokens

    def _refuse(self, rid: str) -> None:
        """Refuse an online request that can no longer meet its target."""
        for req in self._view.remove_waiting(rid):
            message = "The server is overloaded: the request cannot meet its TTFT target."
            refuse(self._scheduler, req, HTTPStatus.SERVICE_UNAVAILABLE, message)
            self._forget(req, Ending.REFUSED)
            self._events["shed"] += 1

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
        error, model, work = self.core.prediction_error, self.core.model, self.core.work
        return {
            "prediction": {"model": model.kind, "mape": error.mape, "bias": error.bias},
            "work": work.totals.to_dict(),
            "plans_failed": self._unplanned.num_failed,
            "decisions": work.decisions.to_list(self._clock.now_s()),
        }
