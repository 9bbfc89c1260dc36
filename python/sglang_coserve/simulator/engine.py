"""The event loop of one engine: arrivals, iterations, safepoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from sglang_coserve.core.offline_queue import QueuedRequest
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import EngineSnapshot, PrefixCache, RequestInfo
from sglang_coserve.core.step import PrefillChunk, StepPlan, StepResult
from sglang_coserve.simulator.counters import Counters
from sglang_coserve.simulator.executor import Executor
from sglang_coserve.simulator.monitor import Monitor
from sglang_coserve.simulator.observer import IterationRecord, Observer, RequestEvent
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.running_batch import RunningBatch
from sglang_coserve.simulator.source import Source

__all__ = ["Engine", "SchedulerDoor"]


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

    def finish(self, rid: str) -> None:
        """Forget a request that ended."""
        ...


class Engine:
    """One simulated engine: the scheduler decides, the executor carries out, time passes.

    Events at the same instant happen in this order: the end of an iteration,
    arrivals (timed ones by time, then the backlog), the next plan. Without a
    ``monitor`` safepoints only cost time.
    """

    def __init__(
        self,
        scheduler: SchedulerDoor,
        executor: Executor,
        source: Source,
        observers: Sequence[Observer] = (),
        monitor: Monitor | None = None,
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
        self._monitor = monitor
        self._may_abort = False
        self._take_back = take_back
        self._seen_until_s = 0.0
        """Arrivals up to here are known to the next plan."""

    @property
    def has_online(self) -> bool:
        """True while an online request runs or waits."""
        return bool(self._executor.waiting or self._executor.num_online_rows)

    def step(self, end_s: float = math.inf) -> bool:
        """Run one iteration, or let time pass until the next arrival before ``end_s``.

        False when nothing is left to do before ``end_s``: then nothing happened.
        """
        executor = self._executor
        self._take_arrivals(self._seen_until_s, self.now_s)
        num_running = len(executor.rows) - executor.num_online_rows
        for request in self._source.refill(len(executor.offline_waiting), num_running, self.now_s):
            self._arrive(request, self.now_s)
        safepoint, monitor = executor.config.safepoint, self._monitor
        self._may_abort = monitor is not None and monitor.may_abort(self.now_s)
        share = safepoint.arrival_wait_share if safepoint and self._may_abort else 1.0
        plan = self._scheduler.plan(executor.snapshot(self.now_s, share), executor)
        if plan.is_idle and not (plan.shed or plan.evict):
            return self._pass_time(end_s)
        if not plan.is_idle:
            self._scheduler.start(plan, plan.prefills)
        self.last_plan = plan
        batch = executor.begin(plan)
        self._tell_changes(plan, batch)
        if plan.is_idle:
            return True
        start_s = self.now_s
        seconds = self._run(batch)
        self.now_s = start_s + seconds
        # With overlap the plan after this one is made while this one runs.
        self._seen_until_s = start_s if executor.config.overlap else self.now_s
        ended = executor.end(batch, self.now_s, seconds)
        self._scheduler.update(batch.result(plan.step, start_s, seconds, self.now_s))
        self._tell_iteration(plan, batch, start_s)
        self._tell_tokens(batch)
        for request in ended:
            self._scheduler.finish(request.info.rid)
            self._tell(RequestEvent.FINISHED, request)
        return True

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
            if request.info.is_online and request.info.arrival_s < now_s:
                request.seen_at(now_s)
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
                    user=info.user,
                )
            )

    def forget(self, request: SimRequest) -> None:
        """Let another engine have a request."""
        self._scheduler.finish(request.info.rid)

    def _run(self, batch: RunningBatch) -> float:
        """Return how long the iteration takes, which a safepoint may end early."""
        executor, safepoint = self._executor, self._executor.config.safepoint
        if safepoint is None or self._monitor is None or not batch.has_offline:
            return batch.seconds
        if not self._may_abort:
            self._monitor.ran(batch)
            return batch.seconds
        start_s, end_s = self.now_s, self.now_s + batch.seconds
        step_s = batch.seconds * safepoint.interval_layers / safepoint.num_layers
        while self._source.next_arrival_s < end_s:
            # With overlap it may have come before the start, after the plan was made.
            now_s = max(self._source.next_arrival_s, start_s)
            arrived = self._take_arrivals(now_s, now_s)
            elapsed_s = now_s - start_s
            next_check = math.floor(elapsed_s / step_s) + 1
            if next_check > safepoint.checks_per_iteration:
                break
            check_s = next_check * step_s
            if any(request.info.is_online for request in arrived) and self._monitor.wants_abort(
                batch,
                executor.waiting,
                now_s,
                elapsed_s,
                check_s - elapsed_s,
                self.last_plan.arrival_wait_s,
            ):
                self.counters.aborts += 1
                self._monitor.aborts(batch, start_s + check_s, check_s)
                for request in executor.abort_offline(batch):
                    self._scheduler.restore(request.info.rid, request.generated_tokens)
                    self._tell(RequestEvent.EVICTED, request, start_s + check_s)
                # The online rows go through the layers that are left.
                layers_left = 1 - check_s / batch.seconds
                return check_s + layers_left * executor.online_part_s(batch)
        self._monitor.ran(batch)
        return batch.seconds

    def _tell_changes(self, plan: StepPlan, batch: RunningBatch) -> None:
        for request in batch.shed:
            self._scheduler.finish(request.info.rid)
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

    def _tell_iteration(self, plan: StepPlan, batch: RunningBatch, start_s: float) -> None:
        online, offline = batch.tokens_by_class()
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
            batch.reloaded_tokens,
            batch.is_aborted,
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
