"""Who is admitted when: the plans of ``core.scheduler`` carried out on SGLang's scheduler.

Every pass that involves offline requests becomes an ``EngineSnapshot``; the core answers
with a ``StepPlan``, which ``PlanExecution`` carries out. Passes without offline requests are
SGLang's alone, unless the order or the overload of online requests is the core's, too. Under the
policy fifo there is no core, and no plan for any pass (``unplanned``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from http import HTTPStatus
from itertools import compress
from typing import Any, Final

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_coserve.core.control.interference import Interference
from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
from sglang_coserve.core.request import Ending, RequestClass
from sglang_coserve.core.scheduler import Scheduler as Core
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.core.step import Lane, StepPlan, StepResult
from sglang_coserve.errors import CoserveError
from sglang_coserve.srt.admission.plan_execution import PlanExecution
from sglang_coserve.srt.admission.unplanned import (
    NotedPass,
    OfflineWaiting,
    UnplannedPasses,
    queued_request,
)
from sglang_coserve.srt.compat import drop_ended, refuse, release_aborted
from sglang_coserve.srt.marks.request_marks import is_offline
from sglang_coserve.srt.profiling.latency_source import known_latency_model
from sglang_coserve.srt.safepoint.instrument import Stops
from sglang_coserve.srt.steps.clocks import RankTime
from sglang_coserve.srt.steps.engine_parts import EngineParts
from sglang_coserve.srt.steps.offline_retraction import Prefill
from sglang_coserve.srt.steps.request_ledger import BatchResults, ending_of

Req = Any
ScheduleBatch = Any

OFFLINE_EVENTS: Final = (
    "received",
    "admitted",
    "parked",
    "retracted",
    "put_back",
    "aborted_waiting",
    "paused",
    "resumed",
    "dropped",
)
"""Counts of what happened to offline requests, for status and metrics."""


class Admission:
    """Keeps the waiting offline requests, and decides what each scheduling pass admits.

    It is the core's ``PrefixCache``, too.
    """

    def __init__(
        self,
        parts: EngineParts,
        core: Core | None,
        forget: Callable[[Req, Ending], None],
    ) -> None:
        """Admit nothing yet.

        Without ``core`` there are no plans: the policy fifo. ``forget`` is called with each request
        that has ended, and how.
        """
        self.core = core
        self._scheduler = parts.scheduler
        self._config = parts.config
        self._judged = Interference(parts.config.slos(), model=None)
        """What online requests got, where there is no core to judge it."""

        self._parts = parts
        self._view = parts.view
        self._retraction = parts.retraction
        self._clock = parts.clock
        self._ledger = parts.ledger
        self._checkpointing = parts.checkpointing
        self._events = parts.events
        self._tell = parts.advisory.tell
        self._forget = forget
        self._plans_online = parts.config.plans_online
        self._steps = parts.tracker
        self._lane = parts.lane
        self.stops: Stops | None = None
        """When the batch of this pass is to stop; None if it runs to its end."""

        self.budget_s: float | None = None if core is None else math.inf
        """What offline work was packed under in the last plan that bounded it; infinite before one.
        None if there are no plans."""

        self._waiting = OfflineWaiting(parts.view.passes_to_settle)
        self._ended: list[Req] = []
        self._plans = PlanExecution(parts, self._waiting.reqs, self._refuse)
        self._plan = StepPlan()
        """The plan of this pass."""

        self._unplanned = UnplannedPasses(parts, self._waiting, has_plans=core is not None)

    # --- Who waits -----------------------------------------------------------------------

    def enqueue(self, req: Req) -> None:
        """Let an offline request wait; ``retraction_count`` is above 0 if it ran before.

        One that ran is not admitted again in the same pass: under overlap scheduling it would take
        the result of its last step, still queued, for its own.
        """
        if req.retraction_count:
            self._waiting.put_back(req)
            return
        self._waiting.reqs[req.rid] = req
        if self.core is not None and not self._unplanned.are_all:
            request = queued_request(req, self._ledger[req.rid].info.arrival_s)
            self._told(self._add, self.core, request)

    def _add(self, core: Core, request: QueuedRequest) -> None:
        """Tell the core of a new offline request, and what is cached of one unlike all others."""
        core.add_offline(request)
        if core.queue.opens_branch(request.rid):
            self._report_cached(core, request.rid)

    def arrived(self, req: Req, info: RequestInfo) -> None:
        """Record an online request that waits in SGLang's queue.

        One that failed validation is not computed.
        """
        if self.core is None:
            self._tell("judgement", self._judged.arrived, info)
            return
        cached_tokens = self._ledger.match_prefix(req) if req.to_finish is None else 0
        self._tell("judgement", self.core.arrived, info, cached_tokens)

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Take out and return the offline requests that match and are in no batch of SGLang's.

        Paused and suspended ones that match stay, and end when they run next. O(waiting).
        """
        gone = self._waiting.remove(matches)
        for req in self._view.paused_requests.unpark_all(matches):
            release_aborted(req, self._scheduler.tree_cache)
            gone.append(req)
        for req in (*self._view.paused_requests.paused, *self._view.suspended):
            if matches(req) and not req.finished():
                req.to_finish = FINISH_ABORT()
        return gone

    def num_waiting(self) -> int:
        """Count the offline requests that are in no batch of SGLang's."""
        view = self._view
        return len(self._waiting) + len(view.paused_requests) + len(view.suspended)

    def kept(self) -> Iterable[Req]:
        """Return the requests that are kept here alone: those that wait, and those that have ended
        and are yet to be forgotten. O(waiting)."""
        return (*self._waiting, *self._ended)

    def forget(self, rid: str, ending: Ending) -> None:
        """Drop what is kept of a request that has ended, if anything is; to be called before the
        ledger forgets."""
        if self.core is None or self._unplanned.are_all:
            self._tell("judgement", self.interference.ended, rid, ending)
        else:
            self._told(self.core.finish, rid, ending)
        self._waiting.reqs.pop(rid, None)

    # --- One pass ------------------------------------------------------------------------

    def admit(self, running_batch: ScheduleBatch, prefill: Prefill) -> Any:
        """Return SGLang's plan of what to prefill beside ``running_batch``.

        The core is asked for a plan, and SGLang admits what that says. ``prefill`` is SGLang's own
        admission of what is in its queue.
        """
        if self.core is None:
            self._begin_pass()
            return self._unplanned.admit(running_batch, prefill)
        if self._clock.timer is not None:
            self._clock.timer.begin_pass()
        self.stops = None
        if self._clock.pacer is not None:
            self._clock.pacer.expects(0.0)
        time = self._clock.read()
        self._checkpointing.prefetch(time.now_s)
        self._learn(self.core, time)
        self._begin_pass()
        if not self._is_planned(running_batch):
            self._steps.decided(self._clock.now_s())
            return prefill(running_batch)
        drop_ended(running_batch)
        running_batch = self._view.paused_requests.resume_ended(running_batch)
        if self._unplanned.are_all:
            return self._unplanned.admit(running_batch, prefill)
        tried = NotedPass(prefill)
        self._plan = StepPlan()
        try:
            result = self._admit(self.core, running_batch, tried, time)
        except Exception as error:
            self.stops = None
            self._unplanned.failed(error, tried)
            is_alone = self._plan.lane is Lane.OFFLINE
            result = self._unplanned.recover(running_batch, tried, is_alone=is_alone)
            for req in () if result.batch_to_run is None else result.batch_to_run.reqs:
                self._waiting.reqs.pop(req.rid, None)
            return result
        self._unplanned.planned()
        return result

    def _admit(
        self, core: Core, running_batch: ScheduleBatch, prefill: Prefill, time: RankTime
    ) -> Any:
        requests = self._view.requests_with_kv(running_batch)
        in_the_way = self._retraction.rids_blocking_adapters(requests)
        if any(req.rid in in_the_way for req in self._view.suspended):
            self._drop()
        self._retraction.retract(in_the_way, running_batch)
        plan = self._new_plan(core, running_batch, time)
        # A step that does not go on now would hold what clients have left for as long as it waits.
        has_left = any(req.to_finish is not None for req in self._view.suspended)
        if plan.drops or (has_left and not plan.resumes):
            self._drop()
            plan = self._new_plan(core, running_batch, time)
        self._plan = plan
        self._steps.decided(self._clock.now_s())
        if math.isfinite(plan.budget_s):
            self.budget_s = plan.budget_s
        executed = self._plans.carry_out(plan, running_batch, prefill)
        for chunk in executed.admitted:
            self._waiting.reqs.pop(chunk.rid, None)
        for rid in executed.refused:
            # No request will end and make room: what holds the memory may be a load that hangs.
            core.no_room(rid)
        if executed.is_started:
            core.start(plan, executed.admitted)
            self._steps.started(plan.step)
        result = executed.result
        if self._clock.pacer is not None and plan.lane is Lane.SHARED:
            self._clock.pacer.expects(plan.predicted_s, core.prediction_error.mape or 0.0)
        if result.batch_to_run is not None:
            self.stops = None
            if plan.lane is Lane.OFFLINE:
                begins_s = time.now_s + time.ahead_s
                ends_s = min(begins_s + plan.predicted_s, plan.until_s)
                self.stops = Stops(plan.until_s, partial(core.must_suspend, ends_s))
        elif plan.lane is Lane.SHARED or plan.is_idle:
            is_left_out = bool(plan.prefills and self._view.waiting)
            if is_left_out or not result.running_batch.reqs:
                # SGLang reserves more memory than a plan, and places for adapters: a suspended
                # step must not hold what an online request waits for, while it waits for that
                # request.
                self.give_up()
        return result

    def _new_plan(self, core: Core, running_batch: ScheduleBatch, time: RankTime) -> StepPlan:
        assert not self._unplanned.are_all, "the core has lost track of what runs"
        return core.plan(self._parts.snapshot(running_batch, time), self)

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
        assert self.core is not None
        self._told(self.core.update, self._lane.drop())
        self._events["dropped"] += 1

    def give_up(self) -> None:
        """Drop the suspended step, if there is one."""
        if self._lane.suspended is not None:
            self._drop()

    def launched(self, batch: ScheduleBatch | None) -> None:
        """Note the batch with which a pass ends, planned or not; None if nothing is to run."""
        if self.core is not None:
            self._steps.launched(batch)

    def stopped(self) -> None:
        """Note that the batch that was launched first has no result: it was suspended."""
        self._steps.processed((), ())

    def processed(self, results: BatchResults) -> None:
        """Note the results of the batch that was launched first.

        Requests that ended are forgotten when the next pass begins.
        """
        self._ended += results.ended
        if self.core is None:
            now_s = self._clock.now_s()
            for req in compress(results.reqs, results.has_token):
                self._tell("judgement", self._judged.produced, req.rid, now_s)
            return
        self._steps.processed(results.reqs, results.has_token)
        if self._waiting.reqs and not self._unplanned.are_all:
            for req in results.first_online:
                self._tell("shared prefixes", self._report_left, self.core, req)

    def _report_left(self, core: Core, req: Req) -> None:
        """Tell the core of an offline request that can use the prompt of an online one."""
        waiting = core.queue.nearest(pack_tokens(req.origin_input_ids))
        if waiting is not None and waiting.rid in self._waiting.reqs:
            self._report_cached(core, waiting.rid)

    def _report_cached(self, core: Core, rid: str) -> None:
        if cached_tokens := self._ledger.match_prefix(self._waiting.reqs[rid]):
            core.cached(rid, cached_tokens)

    def _learn(self, core: Core, time: RankTime) -> None:
        """Tell the core the results that are complete since the last pass."""
        results = self._steps.next_pass(time.now_s, time.parts_s, time.results_s)
        if not results and len(core.interference):
            # Nothing ran, but the baseline goes on: it may be behind.
            results = [StepResult(None, time.now_s)]
        for result in results:
            if self._unplanned.are_all:
                self._tell("judgement", core.update, replace(result, step=None))
            else:
                self._told(core.update, result)

    def _begin_pass(self) -> None:
        """Forget the requests that ended in the last pass, and count one of the cool-downs."""
        for req in self._ended:
            self._forget(req, ending_of(req.finished_reason.to_json()))
        self._ended = []
        for req in self._waiting.start_pass():
            if self.core is not None:
                self._told(self.core.restore, req.rid, len(req.output_ids))

    def _is_planned(self, running_batch: ScheduleBatch) -> bool:
        # A suspended or paused step counts even if all of its requests have ended meanwhile.
        if self.num_waiting() or (self._plans_online and self._view.waiting):
            return True
        if self._plans_online and (running_batch.reqs or self._view.chunk is not None):
            return True
        if not self._ledger.of_class(RequestClass.OFFLINE):
            return False
        return any(is_offline(req) for req in self._view.requests_with_kv(running_batch))

    def cached_tokens(self, rid: str) -> int | None:
        """See ``PrefixCache``."""
        req = self._waiting.reqs[rid]
        return None if self._checkpointing.is_held_back(req) else self._ledger.match_prefix(req)

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
        """What online requests got, and what they would have got alone if that is known."""
        return self._judged if self.core is None else self.core.interference

    def warnings(self, now_s: float) -> list[str]:
        """Return what operators are to know now: of missed targets, and of wrong predictions."""
        warning = self.interference.monitor.warning(now_s)
        drift = None if self.core is None else self.core.prediction_error.warning(now_s)
        return [each for each in (warning, drift) if each is not None]

    def latency_model(self) -> LatencyModel | None:
        """Return what predicts steps now; None if nothing does.

        Without plans nothing depends on it, and the start must not: it is for expected rates alone.
        """
        if self.core is not None:
            return self.core.model
        with suppress(CoserveError):
            return known_latency_model(self._scheduler, self._config)
        return None

    def state(self) -> dict[str, Any]:
        """Return what the status says of plans, in plain values; empty if there are none."""
        if self.core is None:
            return {}
        error, model, work = self.core.prediction_error, self.core.model, self.core.work
        return {
            "prediction": {"model": model.kind, "mape": error.mape, "bias": error.bias},
            "work": asdict(work.totals),
            "plans_failed": self._unplanned.num_failed,
            "decisions": work.decisions.to_list(self._clock.now_s()),
        }
