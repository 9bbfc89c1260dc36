"""The event loop of one engine: arrivals, steps, safepoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from sglang_coserve.core.offline_queue import QueuedRequest
from sglang_coserve.core.request import Ending, RequestState
from sglang_coserve.core.snapshot import EngineSnapshot, PrefixCache, RequestInfo
from sglang_coserve.core.step import Lane, PrefillChunk, StepPlan, StepResult
from sglang_coserve.simulator.counters import Counters
from sglang_coserve.simulator.executor import Executor
from sglang_coserve.simulator.executor_config import SafepointConfig
from sglang_coserve.simulator.observer import IterationRecord, Observer, RequestEvent
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.running_batch import RunningBatch
from sglang_coserve.simulator.source import Source

__all__ = ["Engine", "SchedulerDoor"]

_ROUNDING: Final = 1e-9
"""A share that is a whole number of safepoints may be a little less."""


class SchedulerDoor(Protocol):
    """What the event loop calls of ``core.scheduler.Scheduler``."""

    def arrived(self, info: RequestInfo) -> None:
        """Know of an online request."""
        ...

    def add_offline(self, request: QueuedRequest) -> None:
        """Let an offline request wait."""
        ...

    def plan(self, snapshot: EngineSnapshot, cache: PrefixCache) -> StepPlan:
        """Decide what the next iteration does."""
        ...

    def start(self, plan: StepPlan, chunks: Sequence[PrefillChunk]) -> None:
        """Take the plan as begun, with these of its prefills."""
        ...

    def update(self, result: StepResult) -> None:
        """Learn what came of an iteration."""
        ...

    def restore(self, rid: str, generated_tokens: int) -> None:
        """Let an offline request that lost its KV wait again."""
        ...

    def finish(self, rid: str, ending: Ending = Ending.COMPLETE) -> None:
        """Forget a request that ended."""
        ...


class Engine:
    """One simulated engine: the scheduler decides, the executor carries out, time passes.

    Events at the same instant happen in this order: the end of a step,
    arrivals (timed ones by time, then the backlog), the next plan.
    """

    def __init__(
        self,
        scheduler: SchedulerDoor,
        executor: Executor,
        source: Source,
        observers: Sequence[Observer] = (),
        take_back: Callable[[SimRequest], None] | None = None,
    ) -> None:
        """``take_back`` gets the requests whose KV a plan evicts; None: they wait here."""
        self.now_s = 0.0
        self.last_plan = StepPlan()
        """What the last iteration ran."""

        self.counters = Counters()
        self.requests: list[SimRequest] = []
        """Every request that arrived, in order."""

        self._scheduler = scheduler
        self._executor = executor
        self._source = source
        self._observers = observers
        self._take_back = take_back
        self._seen_until_s = 0.0
        """Arrivals up to here are known to the next plan."""

    @property
    def has_online(self) -> bool:
        """True while an online request runs or waits."""
        return bool(self._executor.waiting or self._executor.num_online_rows)

    @property
    def next_arrival_s(self) -> float:
        """When the next timed request arrives; infinite when none does."""
        return self._source.next_arrival_s

    def step(self, end_s: float = math.inf) -> bool:
        """Run one iteration, or let time pass until the next arrival before ``end_s``.

        False when nothing is left to do before ``end_s``: then nothing happened.
        """
        executor = self._executor
        self._take_arrivals(self._seen_until_s, self.now_s)
        num_running = len(executor.rows) - executor.num_online_rows
        for request in self._source.refill(len(executor.offline_waiting), num_running, self.now_s):
            self._arrive(request, self.now_s)
        plan = self._scheduler.plan(executor.snapshot(self.now_s), executor)
        if plan.drops:
            self._drop()
            return True
        if plan.is_idle and not (plan.shed or plan.evict):
            return self._pass_time(end_s)
        self.last_plan = plan
        batch = executor.suspended if plan.resumes else self._begin(plan)
        if plan.is_idle:
            return True
        assert batch is not None
        start_s = self.now_s
        self._run(plan, batch)
        # With overlap the plan after this one is made while this one runs.
        self._seen_until_s = start_s if executor.config.overlap else self.now_s
        if executor.suspended is batch:
            self.counters.suspensions += 1
            self._tell_step(plan, batch, start_s)
            return True
        ended = executor.end(batch, self.now_s, batch.spent_s)
        self._scheduler.update(batch.result(self.now_s))
        self._tell_step(plan, batch, start_s)
        self._tell_tokens(batch)
        for request in ended:
            self._scheduler.finish(request.info.rid)
            self._tell(RequestEvent.FINISHED, request)
        return True

    def _begin(self, plan: StepPlan) -> RunningBatch:
        if not plan.is_idle:
            self._scheduler.start(plan, plan.prefills)
        batch = self._executor.begin(plan, self.now_s)
        self._tell_changes(plan, batch)
        return batch

    def _drop(self) -> None:
        """Give the suspended step up."""
        executor, counters = self._executor, self.counters
        assert executor.suspended is not None
        counters.drops += 1
        result = executor.suspended.dropped()
        lost = executor.drop()
        self._scheduler.update(result)
        for request in lost:
            self._scheduler.restore(request.info.rid, request.generated_tokens)
            self._tell(RequestEvent.EVICTED, request)

    def _pass_time(self, end_s: float) -> bool:
        if self._executor.settle():
            return True
        # With overlap an idle engine plans at once.
        next_s = max(self.now_s, self._source.next_arrival_s)
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
        self._tell(RequestEvent.ARRIVED, request, now_s)
        if not self._executor.can_hold(request):
            request.move(RequestState.ABORTED)
            self._tell(RequestEvent.SHED, request, now_s)
            return
        self.accept(request)

    def accept(self, request: SimRequest) -> None:
        """Let a request wait here that another engine, or none, had until now."""
        self._executor.submit(request)
        info = request.info
        if info.is_online:
            self._scheduler.arrived(info)
        else:
            self._scheduler.add_offline(
                QueuedRequest(
                    info.rid,
                    request.prompt,
                    info.arrival_s,
                    info.max_new_tokens,
                    request.generated_tokens,
                    request.deadline_s,
                    expected_output_tokens=request.expected_output_tokens,
                )
            )

    def forget(self, request: SimRequest) -> None:
        """Let another engine have a request."""
        self._scheduler.finish(request.info.rid, Ending.ABORTED)

    def _run(self, plan: StepPlan, batch: RunningBatch) -> None:
        """Let time pass until the step ends, or is suspended at a safepoint."""
        executor, safepoint = self._executor, self._executor.config.safepoint
        start_s, resume_s = self.now_s, 0.0
        if plan.resumes:
            assert safepoint is not None
            resume_s = safepoint.resume_s
        share = 1.0
        if plan.lane is Lane.OFFLINE and safepoint is not None:
            share = self._share_done(plan, batch, start_s + resume_s, safepoint)
        seconds = resume_s + (share - batch.done_share) * batch.seconds
        batch.done_share = share
        batch.spent_s += seconds
        self.now_s = start_s + seconds
        if plan.lane is Lane.OFFLINE:
            executor.suspended = batch if share < 1.0 else None

    def _share_done(
        self, plan: StepPlan, batch: RunningBatch, start_s: float, safepoint: SafepointConfig
    ) -> float:
        """Return how much of a step of the offline lane is done when it is suspended or ends.

        It stops at the last safepoint before its time is up, and at the first after an online
        arrival, but where the rest takes no longer than to suspend it.
        """
        whole_s, done_share, step_share = batch.seconds, batch.done_share, safepoint.stop_share
        end_s = start_s + (1 - done_share) * whole_s
        share = 1.0
        if plan.until_s < end_s:
            until_share = done_share + (plan.until_s - start_s) / whole_s
            share = math.floor(until_share / step_share + _ROUNDING) * step_share
            # A step gets on, or it would be resumed for ever.
            share = max(share, _next(done_share, step_share))
        while (arrival_s := self._source.next_arrival_s) < start_s + (share - done_share) * whole_s:
            # With overlap it may have come before the start, after the plan was made.
            now_s = max(arrival_s, start_s)
            arrived = self._take_arrivals(now_s, now_s)
            now_share = done_share + (now_s - start_s) / whole_s
            at_share = _next(now_share, step_share)
            is_worth = (1 - at_share) * whole_s > safepoint.resume_s
            if is_worth and any(request.info.is_online for request in arrived):
                share = min(share, at_share)
        return min(share, 1.0)

    def _tell_changes(self, plan: StepPlan, batch: RunningBatch) -> None:
        for request in batch.shed:
            self._scheduler.finish(request.info.rid, Ending.REFUSED)
            self._tell(RequestEvent.SHED, request)
        for request in batch.evicted:
            self.counters.evictions += 1
            self._tell(RequestEvent.EVICTED, request)
            if self._take_back is not None:
                self._executor.withdraw(request)
                self._take_back(request)
            elif not request.info.is_online:
                self._scheduler.restore(request.info.rid, request.generated_tokens)
        self.counters.pauses += len(plan.pause)
        if not self._observers:
            return
        rows = self._executor.rows
        for rids, event in (
            (plan.pause, RequestEvent.PAUSED),
            (plan.resume, RequestEvent.RESUMED),
            (plan.park, RequestEvent.PARKED),
        ):
            for rid in rids:
                self._tell(event, rows[rid])

    def _tell_step(self, plan: StepPlan, batch: RunningBatch, start_s: float) -> None:
        is_suspended = self._executor.suspended is batch
        online, offline = (0, 0) if is_suspended else batch.tokens_by_class()
        counters = self.counters
        counters.iterations += 1
        counters.busy_s += self.now_s - start_s
        counters.online_tokens += online
        counters.offline_tokens += offline
        if not self._observers:
            return
        executor = self._executor
        record = IterationRecord(
            counters.iterations - 1,
            start_s,
            self.now_s,
            plan.predicted_s,
            plan.budget_s,
            online,
            offline,
            executor.num_online_rows,
            len(executor.rows) - executor.num_online_rows,
            len(executor.waiting),
            len(executor.offline_waiting),
            executor.pool.held_tokens,
            executor.cache.evictable_tokens,
            tuple((request.info.rid, tokens) for request, tokens in batch.chunks),
            batch.online_decodes,
            len(batch.decodes) - batch.online_decodes,
            0 if plan.resumes else batch.reloaded_tokens,
            is_suspended,
        )
        for observer in self._observers:
            observer.on_iteration(record)

    def _tell_tokens(self, batch: RunningBatch) -> None:
        if self._observers:
            for request, _ in batch.chunks:
                if len(request.token_times_s) == 1:
                    self._tell(RequestEvent.FIRST_TOKEN, request)

    def _tell(self, event: RequestEvent, request: SimRequest, at_s: float | None = None) -> None:
        for observer in self._observers:
            observer.on_request(self.now_s if at_s is None else at_s, event, request)


def _next(share: float, step_share: float) -> float:
    """Return the next safepoint behind ``share``, or the end."""
    return min((math.floor(share / step_share + _ROUNDING) + 1) * step_share, 1.0)
