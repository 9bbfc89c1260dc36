"""The event loop of one engine: arrivals, steps, safepoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from sglang_coserve.core.offline_queue import QueuedRequest
from sglang_coserve.core.request import Ending, RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.core.step import Lane, StepPlan
from sglang_coserve.simulator.binding import TrafficSource
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.executor_config import SafepointConfig
from sglang_coserve.simulator.observer import RequestEvent, SimulationObserver
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.result import Counters
from sglang_coserve.simulator.running_step import RunningStep

_ROUNDING: Final = 1e-9
"""Tolerance for shares that are multiples of a safepoint's share."""


class SimEngine:
    """The event loop of one simulated engine, with a scheduler and an executor.

    Simultaneous events are processed in this order: the end of a step,
    arrivals (timed ones by time, then the backlog), the next plan.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: SimulatedExecutor,
        source: TrafficSource,
        observers: Sequence[SimulationObserver] = (),
        take_back: Callable[[SimRequest], None] | None = None,
        *,
        follows_latencies: bool = True,
    ) -> None:
        """Start without requests.

        ``take_back`` is called with retracted requests; with None they wait here again.
        ``follows_latencies``: the scheduler is told of online requests, to judge and compare them.
        """
        self.now_s = 0.0
        self.last_plan = StepPlan()
        """The plan of the last step."""

        self.counters = Counters()
        self.requests: list[SimRequest] = []
        """Every request that arrived, in order."""

        self.executor = executor
        self._scheduler = scheduler
        self._source = source
        self._observers = observers
        self._take_back = take_back
        self._follows_latencies = follows_latencies
        self._seen_until_s = 0.0
        """Time up to which arrivals are visible to the next plan."""

    @property
    def has_online(self) -> bool:
        """True while an online request runs or waits."""
        return bool(self.executor.waiting or self.executor.num_online)

    def step(self, end_s: float = math.inf) -> bool:
        """Run one step, or advance the time to the next event before ``end_s``.

        Returns False, and does nothing, if there is nothing to do before ``end_s``.
        """
        executor = self.executor
        self._take_arrivals(self._seen_until_s, self.now_s)
        for request in self._source.refill(len(executor.offline_waiting), self.now_s):
            self._arrive(request, self.now_s)
        executor.host.advance(self.now_s)
        if self._follows_latencies:
            executor.kv.online_lease_s = self._scheduler.online_lease_s(self.now_s)
        plan = self._scheduler.plan(executor.snapshot(self.now_s), executor)
        while executor.hold_back(plan, self.now_s):
            plan = self._scheduler.plan(executor.snapshot(self.now_s), executor)
        if plan.drops:
            self._drop()
            return True
        if plan.is_idle and not (plan.shed or plan.retract):
            return self._pass_time(end_s)
        self.last_plan = plan
        batch = executor.suspended if plan.resumes else self._begin(plan)
        if plan.is_idle:
            return True
        assert batch is not None
        start_s = self.now_s
        self._run(plan, batch)
        config = executor.config
        plans_late = not config.overlap or (config.paced and batch.has_offline)
        self._seen_until_s = self.now_s if plans_late else start_s
        if executor.suspended is batch:
            self.counters.suspensions += 1
            self._report_step(plan, batch, start_s)
            return True
        ended = executor.end(batch, self.now_s)
        self._scheduler.update(batch.result(self.now_s))
        self._report_step(plan, batch, start_s)
        self._report_tokens(batch)
        for request in ended:
            self._scheduler.finish(request.info.rid, output_tokens=request.generated_tokens)
            self._notify(RequestEvent.FINISHED, request)
        return True

    def _begin(self, plan: StepPlan) -> RunningStep:
        if not plan.is_idle:
            self._scheduler.start(plan, plan.prefills)
        batch = self.executor.begin(plan, self.now_s)
        self._report_changes(plan, batch)
        return batch

    def _drop(self) -> None:
        """Drop the suspended step."""
        executor, counters = self.executor, self.counters
        assert executor.suspended is not None
        counters.drops += 1
        result = executor.suspended.dropped()
        lost = executor.drop()
        self._scheduler.update(result)
        for request in lost:
            self._wait_again(request)

    def _pass_time(self, end_s: float) -> bool:
        if self.executor.settle():
            return True
        # With overlap an idle engine plans at once.
        event_s = min(self._source.next_arrival_s, self.executor.host.next_s)
        next_s = max(self.now_s, event_s)
        if not next_s < end_s:
            return False
        self.now_s = self._seen_until_s = next_s
        return True

    def _take_arrivals(self, until_s: float, now_s: float) -> list[SimRequest]:
        arrived = list(self._source.arrived(until_s))
        for request in arrived:
            self._arrive(request, now_s)
        return arrived

    def _arrive(self, request: SimRequest, now_s: float) -> None:
        self.requests.append(request)
        self._notify(RequestEvent.ARRIVED, request, now_s)
        if not self.executor.can_hold(request):
            request.move(RequestState.ABORTED)
            self._notify(RequestEvent.SHED, request, now_s)
            return
        self.accept(request)

    def accept(self, request: SimRequest) -> None:
        """Add a waiting request, which is new or comes from another engine."""
        self.executor.submit(request)
        info = request.info
        if not info.is_online:
            self._scheduler.add_offline(
                QueuedRequest(
                    info.rid,
                    request.prompt,
                    info.arrival_s,
                    info.max_new_tokens,
                    request.generated_tokens,
                    expected_output_tokens=request.expected_output_tokens,
                )
            )
        elif self._follows_latencies:
            self._scheduler.arrived(info, request.prompt)

    def forget(self, request: SimRequest) -> None:
        """Remove a request that moves to another engine."""
        self._scheduler.finish(request.info.rid, Ending.ABORTED)

    def _run(self, plan: StepPlan, batch: RunningStep) -> None:
        """Advance the time until the step ends or is suspended at a safepoint."""
        executor, safepoint = self.executor, self.executor.config.safepoint
        start_s, resume_s = self.now_s, 0.0
        if plan.resumes:
            assert safepoint is not None
            resume_s = safepoint.resume_s
            batch.suspensions += 1
        share = 1.0
        if plan.lane is Lane.OFFLINE and safepoint is not None:
            share = self._share_done(plan, batch, start_s + resume_s, safepoint)
        seconds = resume_s + (share - batch.done_share) * batch.seconds
        batch.done_share = share
        batch.spent_s += seconds
        self.now_s = start_s + seconds
        if plan.lane is Lane.OFFLINE:
            batch.suspended_s = self.now_s
            executor.suspended = batch if share < 1.0 else None

    def _share_done(
        self, plan: StepPlan, batch: RunningStep, start_s: float, safepoint: SafepointConfig
    ) -> float:
        """Return the share of an offline-lane step that is done when it is suspended or ends.

        It stops at the last safepoint before ``plan.until_s``, and at the first one after an
        online arrival for which the scheduler suspends it, unless the rest takes no longer than
        suspending it.
        """
        whole_s, done_share, step_share = batch.seconds, batch.done_share, safepoint.stop_share
        end_s = start_s + (1 - done_share) * whole_s
        share = 1.0
        if plan.until_s < end_s:
            until_share = done_share + (plan.until_s - start_s) / whole_s
            share = math.floor(until_share / step_share + _ROUNDING) * step_share
            # A step always makes progress, or it would be resumed forever.
            share = max(share, _next(done_share, step_share))
        predicted_s = min(start_s + plan.predicted_s, plan.until_s)
        waiting: list[RequestInfo] = []
        while (arrival_s := self._source.next_arrival_s) < start_s + (share - done_share) * whole_s:
            # With overlap a request may have arrived between the plan and the start.
            now_s = max(arrival_s, start_s)
            arrived = [request.info for request in self._take_arrivals(now_s, now_s)]
            waiting += [info for info in arrived if info.is_online]
            now_share = done_share + (now_s - start_s) / whole_s
            at_share = _next(now_share, step_share)
            is_worth = (1 - at_share) * whole_s > safepoint.resume_s
            if is_worth and waiting and self._scheduler.must_suspend(predicted_s, waiting, now_s):
                share = min(share, at_share)
        return min(share, 1.0)

    def _report_changes(self, plan: StepPlan, batch: RunningStep) -> None:
        for request in batch.shed:
            self._scheduler.finish(request.info.rid, Ending.REFUSED)
            self._notify(RequestEvent.SHED, request)
        for request in batch.retracted:
            self.counters.retractions += 1
            self._wait_again(request)
        self.counters.pauses += len(plan.pause)
        requests = self.executor.admitted
        for rids, event in (
            (plan.pause, RequestEvent.PAUSED),
            (plan.resume, RequestEvent.RESUMED),
            (plan.park, RequestEvent.PARKED),
        ):
            for rid in rids:
                self._notify(event, requests[rid])

    def _wait_again(self, request: SimRequest) -> None:
        self._notify(RequestEvent.RETRACTED, request)
        if self._take_back is not None:
            self.executor.withdraw(request)
            self._take_back(request)
        elif not request.info.is_online:
            self._scheduler.restore(request.info.rid, request.generated_tokens)

    def _report_step(self, plan: StepPlan, batch: RunningStep, start_s: float) -> None:
        is_suspended = self.executor.suspended is batch
        online, offline = (0, 0) if is_suspended else batch.tokens_by_class()
        counters = self.counters
        counters.iterations += 1
        counters.busy_s += self.now_s - start_s
        counters.online_tokens += online
        counters.offline_tokens += offline
        if not self._observers:
            return
        executor = self.executor
        record = {
            "number": counters.iterations - 1,
            "start_s": start_s,
            "end_s": self.now_s,
            "predicted_s": plan.predicted_s,
            "budget_s": None if math.isinf(plan.budget_s) else plan.budget_s,
            # Computed and kept: those of a suspended step are in the part in which it ends.
            "online_tokens": online,
            "offline_tokens": offline,
            # Requests that hold KV, also paused and parked ones.
            "online_running": executor.num_online,
            "offline_running": len(executor.admitted) - executor.num_online,
            "online_waiting": len(executor.waiting),
            "offline_waiting": len(executor.offline_waiting),
            "held_kv_tokens": executor.kv.held_tokens,
            # That only the prefix cache holds.
            "cached_kv_tokens": executor.cache.evictable_tokens,
            "prefills": [(request.info.rid, tokens) for request, tokens in batch.chunks],
            "online_decodes": len(batch.online_decodes),
            "offline_decodes": len(batch.decodes) - len(batch.online_decodes),
            "is_suspended": is_suspended,
        }
        for observer in self._observers:
            observer.on_step(record)

    def _report_tokens(self, batch: RunningStep) -> None:
        if self._observers:
            for request, _ in batch.chunks:
                if len(request.token_times_s) == 1:
                    self._notify(RequestEvent.FIRST_TOKEN, request)

    def _notify(self, event: RequestEvent, request: SimRequest, at_s: float | None = None) -> None:
        for observer in self._observers:
            observer.on_request(self.now_s if at_s is None else at_s, event, request)


def _next(share: float, step_share: float) -> float:
    """Return the share at the next safepoint after ``share``, or 1."""
    return min((math.floor(share / step_share + _ROUNDING) + 1) * step_share, 1.0)
