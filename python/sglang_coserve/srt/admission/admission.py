"""Decides who is admitted when: carries out the plans of the core on SGLang's scheduler.

Every pass that involves offline requests becomes an ``EngineSnapshot``; the core answers
with a ``StepPlan``, which ``PlanExecution`` carries out. Passes without offline requests are
SGLang's alone, unless the overload of online requests is the core's, too. A plan advises SGLang,
and must not end it: where one fails, another that is made without the core (``OnlineOnly``) is
carried out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
from sglang_coserve.core.request import Ending, RequestClass
from sglang_coserve.core.scheduler import Scheduler as Core
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.core.step import Lane, StepPlan, StepResult
from sglang_coserve.srt.admission.fail_safe import FailSafe, StoppedCore
from sglang_coserve.srt.admission.online_only import BY_SGLANG_RULES, WHILE_STOPPED
from sglang_coserve.srt.admission.plan_execution import PlanExecution
from sglang_coserve.srt.compat import drop_ended, refuse, release_aborted
from sglang_coserve.srt.marks.offline_marks import deadline_of, expected_tokens_of
from sglang_coserve.srt.marks.request_marks import is_offline
from sglang_coserve.srt.safepoint.instrument import Stops
from sglang_coserve.srt.steps.clocks import RankTime
from sglang_coserve.srt.steps.engine_parts import EngineParts
from sglang_coserve.srt.steps.engine_requests import ending_of, packed_tokens
from sglang_coserve.srt.steps.offline_retraction import Prefill
from sglang_coserve.srt.steps.step_record import StepRecord

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
        core: Core,
        forget: Callable[[Req, Ending], None],
        observe: Callable[[StepRecord], None],
    ) -> None:
        """Admit nothing yet.

        Args:
            parts: The parts of the engine.
            core: Plans the steps.
            forget: Called with each request that has ended, and how.
            observe: Called with the record of each step, after the core has learned from it.
        """
        self.core = core
        self._scheduler = parts.scheduler
        self._snapshots = parts.snapshots
        self._queues = parts.queues
        self._retraction = parts.retraction
        self._clock = parts.clock
        self._requests = parts.requests
        self._kv_store = parts.kv_store
        self._leases = parts.leases
        self._events = parts.events
        self._tell_advisory = parts.advisory.tell
        self._forget = forget
        self._observe = observe
        self._plans_online = parts.config.plans_online
        self._steps = parts.tracker
        self._lane = parts.lane
        self.stops: Stops | None = None
        """When the batch of this pass is to stop; None if it runs to its end."""

        self.budget_s = math.inf
        """Budget of offline work in the last plan that had one, in seconds; infinite before."""

        self._waiting: dict[str, Req] = {}
        """The offline requests that hold no KV and are in no batch, by rid."""

        self._settling: deque[list[Req]] = deque([] for _ in range(parts.queues.passes_to_settle))
        """The requests that were put back in each of the last passes, the oldest pass first. The
        core learns that they wait once the results of their last step have come."""

        self._plans = PlanExecution(parts, self._waiting, self._refuse, self.give_up)
        self._leaves_online = False
        """See ``Executed``, of the last plan."""

        self._fail_safe = FailSafe(parts.advisory, self._replace_core)
        self._tell = self._fail_safe.tell

    def _replace_core(self) -> None:
        self.core = StoppedCore(self.core)

    # --- Who waits -----------------------------------------------------------------------

    def enqueue(self, req: Req) -> None:
        """Let an offline request wait; ``retraction_count`` is above 0 if it ran before.

        One that ran is not admitted again in the same pass: under overlap scheduling it would take
        the result of its last step, still queued, for its own.
        """
        self._waiting[req.rid] = req
        if req.retraction_count:
            self._settling[-1].append(req)
        else:
            self._tell(self._add, req)

    def _add(self, req: Req) -> None:
        """Tell the core of a new offline request, and what is cached of one unlike all others."""
        self.core.add_offline(_queued_request(req, self._requests[req.rid].info.arrival_s))
        queue = self.core.queue
        if req.rid in queue and queue.opens_branch(req.rid):
            self._report_cached(req.rid)

    def arrived(self, req: Req, info: RequestInfo) -> None:
        """Record an online request that waits in SGLang's queue.

        One that failed validation is not computed.
        """
        prompt = packed_tokens(req) if req.to_finish is None else pack_tokens(())
        self._tell_advisory("judgement", self.core.arrived, info, prompt)

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Take out and return the offline requests that match and are in no batch of SGLang's.

        Paused ones that match end as the next pass begins, suspended ones when they run next or are
        dropped. O(waiting).
        """
        waiting = [req for req in self._waiting.values() if matches(req)]
        for req in waiting:
            del self._waiting[req.rid]
        return waiting + self._remove_begun(matches)

    def remove_named(self, rid: str) -> list[Req]:
        """Take out the request with this rid, as ``remove`` does. O(requests with KV)."""
        named = self._waiting.pop(rid, None)
        return self._remove_begun(lambda req: req.rid == rid) if named is None else [named]

    def _remove_begun(self, matches: Callable[[Req], bool]) -> list[Req]:
        gone = []
        for req in self._queues.paused_requests.unpark_all(matches):
            release_aborted(req, self._scheduler.tree_cache)
            gone.append(req)
        for req in (*self._queues.paused_requests.paused, *self._queues.suspended):
            if matches(req) and not req.finished():
                req.to_finish = FINISH_ABORT()
        return gone

    def num_waiting(self) -> int:
        """Count the offline requests that are in no batch of SGLang's."""
        return len(self._waiting) + self._num_held()

    @property
    def has_work(self) -> bool:
        """True when offline requests outside of SGLang's batches will go on. Waiting ones do not
        once offline work has stopped."""
        return bool(self._num_held() or (self._waiting and self.stopped_by is None))

    def _num_held(self) -> int:
        """Count the paused, parked and suspended requests."""
        return len(self._queues.paused_requests) + len(self._queues.suspended)

    def kept(self) -> Iterable[Req]:
        """Return the requests that wait, and those whose results are yet to be looked at.
        O(waiting)."""
        return (*self._waiting.values(), *self._steps.kept())

    def forget(self, rid: str, ending: Ending) -> None:
        """Drop what is kept of a request that has ended, if anything is; to be called before the
        register of requests forgets."""
        self._tell(self._finish, rid, ending)
        self._waiting.pop(rid, None)

    def _finish(self, rid: str, ending: Ending) -> None:
        """Tell the core that a request has ended, and what it leaves in the cache."""
        live = self._requests.get(rid)
        if live is None or ending is not Ending.COMPLETE:
            self.core.finish(rid, ending)
            return
        tokens = packed_tokens(live.req) if live.is_online else pack_tokens(())
        self.core.finish(rid, ending, token_ids=tokens, output_tokens=len(live.req.output_ids))

    # --- One pass ------------------------------------------------------------------------

    def admit(self, running_batch: ScheduleBatch, prefill: Prefill) -> Any:
        """Return SGLang's plan of what to prefill beside ``running_batch``.

        A plan is made, and SGLang admits what that says. ``prefill`` is SGLang's own admission of
        what is in its queue.

        Raises:
            Exception: carrying out the plan failed after SGLang's admission had begun. Another plan
                would not mend that.
        """
        time = self._begin_pass()
        if not self._is_planned(running_batch):
            self._steps.decided(self._clock.now_s())
            return prefill(running_batch)
        drop_ended(running_batch)
        self._retraction.end_aborted()
        self._free_adapters(running_batch)
        has_begun = False

        def begin(batch: ScheduleBatch) -> Any:
            nonlocal has_begun
            has_begun = True
            return prefill(batch)

        try:
            plan = self._plan(running_batch, time)
            result = self._carry_out(plan, running_batch, begin, time)
        except Exception as error:
            if has_begun:
                raise
            plan = self._fail_safe.online_only(error)
            return self._carry_out(plan, running_batch, prefill, time)
        self._fail_safe.planned()
        return result

    def _begin_pass(self) -> RankTime:
        """Begin a pass in all parts, and tell the core of results and ends since the last pass."""
        if self._clock.timer is not None:
            self._clock.timer.begin_pass()
        self.stops = None
        if self._clock.pacer is not None:
            self._clock.pacer.expects(0.0)
        time = self._clock.read()
        self._leases.begin_pass(time.now_s, self.core.online_lease_s(time.now_s))
        self._kv_store.begin_pass(time.now_s)
        self._learn(time)
        for req in self._steps.take_ended():
            self._forget(req, ending_of(req.finished_reason.to_json()))
        settled = self._settling.popleft()
        self._settling.append([])
        for req in settled:
            waiting: Any = self._waiting.get(req.rid)
            if waiting is req:
                self._tell(self.core.restore, req.rid, len(req.output_ids))
        return time

    def _is_planned(self, running_batch: ScheduleBatch) -> bool:
        # A suspended or paused step counts even if all of its requests have ended meanwhile.
        if self.num_waiting() or (self._plans_online and self._queues.waiting):
            return True
        if self._plans_online and (running_batch.reqs or self._queues.chunk is not None):
            return True
        if not self._requests.of_class(RequestClass.OFFLINE):
            return False
        return any(is_offline(req) for req in self._queues.requests_with_kv(running_batch))

    def _free_adapters(self, running_batch: ScheduleBatch) -> None:
        """Retract offline requests whose LoRA adapters leave no slot to an online request."""
        requests = self._queues.requests_with_kv(running_batch)
        in_the_way = self._retraction.rids_blocking_adapters(requests)
        if any(req.rid in in_the_way for req in self._queues.suspended):
            self._drop()
        self._retraction.retract(in_the_way, running_batch)

    def _plan(self, running_batch: ScheduleBatch, time: RankTime) -> StepPlan:
        """Return the plan of this pass, after the suspended step was dropped if that must be."""
        if self.stopped_by is not None:
            return WHILE_STOPPED
        if self._leaves_online:
            return BY_SGLANG_RULES
        plan = self.core.plan(self._snapshots.take(running_batch, time), self)
        # A step that does not go on now would hold what clients have left for as long as it waits.
        has_left = any(req.to_finish is not None for req in self._queues.suspended)
        if plan.drops or (has_left and not plan.resumes):
            self._drop()
            return self._plan(running_batch, time)
        return plan

    def _carry_out(
        self, plan: StepPlan, running_batch: ScheduleBatch, prefill: Prefill, time: RankTime
    ) -> Any:
        self._steps.decided(self._clock.now_s())
        if math.isfinite(plan.budget_s):
            self.budget_s = plan.budget_s
        executed = self._plans.carry_out(plan, running_batch, prefill)
        self._leaves_online = executed.leaves_online
        for chunk in executed.admitted:
            self._waiting.pop(chunk.rid, None)
        for rid in executed.refused:
            # No request will end and make room: what holds the memory may be a load that hangs.
            self._tell(self.core.no_room, rid)
        if executed.is_started:
            self._tell(self.core.start, plan, executed.admitted)
            self._steps.started(plan)
        result = executed.result
        if self._clock.pacer is not None and plan.lane is Lane.SHARED:
            error = self.core.prediction_error.mape or 0.0
            self._clock.pacer.expects(plan.predicted_s, error)
        if result.batch_to_run is not None:
            self.stops = None
            if plan.lane is Lane.OFFLINE:
                begins_s = time.now_s + time.ahead_s
                ends_s = min(begins_s + plan.predicted_s, plan.until_s)
                self.stops = Stops(plan.until_s, partial(self.core.must_suspend, ends_s))
        elif plan.lane is Lane.SHARED or plan.is_idle:
            is_left_out = bool(plan.prefills and self._queues.waiting)
            if is_left_out or not result.running_batch.reqs:
                # SGLang reserves more memory than a plan, and places for adapters: a suspended
                # step must not hold what an online request waits for, while it waits for that
                # request.
                self.give_up()
        return result

    def _drop(self) -> None:
        record = self._lane.drop()
        self._tell(self.core.update, record.result)
        self._observe(record)
        self._events["dropped"] += 1

    def give_up(self) -> None:
        """Drop the suspended step, if there is one."""
        if self._lane.suspended is not None:
            self._drop()

    def _report_left(self, record: StepRecord) -> None:
        """Tell the core of offline requests that can use the prompts of a step's online ones."""
        for request in record.first:
            if not request.info.is_online or (live := self._requests.get(request.info.rid)) is None:
                continue
            waiting = self.core.queue.nearest(pack_tokens(live.req.origin_input_ids))
            if waiting is not None and waiting.rid in self._waiting:
                self._report_cached(waiting.rid)

    def _report_cached(self, rid: str) -> None:
        if cached_tokens := self._snapshots.match_prefix(self._waiting[rid]):
            self.core.cached(rid, cached_tokens)

    def _learn(self, time: RankTime) -> None:
        """Tell the core and the observers of the steps that are complete since the last pass."""
        records = self._steps.next_pass(time.now_s, time.parts_s, time.results_s)
        if not records and len(self.core.interference):
            # Nothing ran, but the baseline goes on: it may be behind.
            self._tell(self.core.update, StepResult(None, time.now_s))
        for record in records:
            self._tell(self.core.update, record.result)
            self._observe(record)
            if self._waiting:
                self._tell_advisory("shared prefixes", self._report_left, record)

    def cached_tokens(self, rid: str) -> int | None:
        """See ``PrefixCache``."""
        req = self._waiting[rid]
        return self._snapshots.match_prefix(req) if self._kv_store.loaded(req) else None

    def _refuse(self, rid: str) -> None:
        """Refuse an online request that can no longer meet its target."""
        for req in self._queues.remove_waiting(rid):
            message = "The server is overloaded: the request cannot meet its TTFT target."
            refuse(self._scheduler, req, HTTPStatus.SERVICE_UNAVAILABLE, message)
            self._forget(req, Ending.REFUSED)
            self._events["shed"] += 1

    # --- What others ask about -----------------------------------------------------------

    def flushed(self) -> None:
        """Record that SGLang has emptied its prefix cache."""
        self._tell_advisory("judgement", self.core.flushed)

    @property
    def stopped_by(self) -> str | None:
        """The error that stopped offline work; None while offline requests are served."""
        return self._fail_safe.stopped_by

    def warnings(self, now_s: float) -> list[str]:
        """Return what operators are to know now: of missed targets, and of wrong predictions."""
        warning = self.core.interference.monitor.warning(now_s)
        drift = self.core.prediction_error.warning(now_s)
        return [each for each in (warning, drift) if each is not None]

    def state(self) -> dict[str, Any]:
        """Return what the status says of plans, in plain values."""
        error, model, work = self.core.prediction_error, self.core.model, self.core.work
        return {
            "prediction": {"model": model.kind, "mape": error.mape, "bias": error.bias},
            "work": asdict(work.totals),
            "plans_failed": self._fail_safe.num_failed,
            "decisions": work.decisions.to_list(self._clock.now_s()),
        }


def _queued_request(req: Req, arrival_s: float) -> QueuedRequest:
    """Return the core's description of a request that waits for the first time."""
    return QueuedRequest(
        rid=req.rid,
        token_ids=pack_tokens(req.origin_input_ids),
        arrival_s=arrival_s,
        max_new_tokens=req.sampling_params.max_new_tokens,
        num_generated_tokens=len(req.output_ids),
        deadline_s=deadline_of(req, arrival_s),
        expected_output_tokens=expected_tokens_of(req),
    )
