"""The scheduler: one decision an iteration, the same code for the engine and the simulator."""

from __future__ import annotations

import math
from typing import Final

from sglang_coserve.core.arrival_rate import ArrivalRate
from sglang_coserve.core.arrival_wait import ArrivalWait
from sglang_coserve.core.batch_builder import BatchBuilder
from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.bottleneck import fixed_s
from sglang_coserve.core.fairness import ArrivalOrder, VirtualTokenCounter, WaitingOrder
from sglang_coserve.core.late_gaps import LateGaps
from sglang_coserve.core.latency_model import LatencyModel, Refiner, Sample
from sglang_coserve.core.offline_queue import OfflineQueue, QueuedRequest
from sglang_coserve.core.plan_context import PlanContext
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.prediction_error import PredictionError
from sglang_coserve.core.scheduler_config import OnlineOrder, SchedulerConfig
from sglang_coserve.core.snapshot import EngineSnapshot, PrefixCache, StepPlan
from sglang_coserve.metrics import SloTargets

__all__ = ["Scheduler"]

_ITERATION_WEIGHT: Final = 0.1
_EVICTION_WEIGHT: Final = 1 / 32
_MOST_MARGIN: Final = 0.2

# Refining costs more than planning, but for many iterations little more than for one.
_REFINED_AT_ONCE: Final = 16


class Scheduler:
    """Decides what each iteration runs.

    The caller asks for a plan, carries it out, and reports: ``commit`` for the
    plan it carries out, ``restore`` for each offline request that was evicted,
    ``finish`` for each request that ended. ``plan`` only looks, so a plan may
    be dropped and asked for again. The same events give the same plans.
    """

    def __init__(
        self,
        policy: Policy,
        model: LatencyModel,
        targets: SloTargets,
        queue: OfflineQueue,
        config: SchedulerConfig | None = None,
        *,
        profile_mape: float | None = None,
    ) -> None:
        """Start without requests.

        Args:
            policy: A fresh one: policies keep state.
            model: Predicts iterations; ``observe`` may correct it.
            targets: Of online requests without their own.
            queue: The waiting offline requests; the scheduler's alone from now on.
            config: What all policies share.
            profile_mape: The error of ``model`` when it was fitted, a fraction.
        """
        self._policy = policy
        self._model = model
        self._targets = targets
        self._queue = queue
        self._config = config or SchedulerConfig()
        self._refiner = Refiner(model) if self._config.refine else None
        fair = self._config.online_order is OnlineOrder.VTC
        self._waiting_order: WaitingOrder = VirtualTokenCounter() if fair else ArrivalOrder()
        self._observed: list[Sample] = []
        self._iteration = 0
        self._prediction_error = PredictionError(profile_mape)
        self._mean_iteration_s = 0.0
        self._eviction_rate = 0.0
        self._arrival_rate = ArrivalRate()
        self._late_gaps = LateGaps()
        ttft_s = targets.ttft_s
        self._arrival_wait = None if ttft_s is None else ArrivalWait(ttft_s)

    @property
    def model(self) -> LatencyModel:
        """The latency model, as refined so far."""
        return self._model

    @property
    def prediction_error(self) -> PredictionError:
        """How well the model predicted the observed iterations, before it was corrected."""
        return self._prediction_error

    @property
    def queue(self) -> OfflineQueue:
        """The offline requests that wait."""
        return self._queue

    def add_offline(self, request: QueuedRequest) -> None:
        """Let an offline request wait.

        Raises:
            RequestError: a request with its rid waits or runs.
        """
        self._queue.add(request)

    def plan(self, snapshot: EngineSnapshot, cache: PrefixCache) -> StepPlan:
        """Return what the next iteration does; changes nothing.

        O(rows + waiting online requests), whatever waits in the offline queue.
        """
        batch = BatchBuilder(snapshot, self._model, self._targets, self._policy.victims)
        context = PlanContext(
            config=self._config,
            queue=self._queue,
            cache=cache,
            waiting=self._waiting_order.ordered(snapshot.waiting),
            iteration=self._iteration,
            margin=self._margin(),
            arrival_wait_s=self._arrival_wait_s(snapshot),
            arrivals_per_s=self._arrival_rate.per_s(snapshot.now_s),
            mean_iteration_s=self._mean_iteration_s,
            late_gaps=self._late_gaps.left,
            eviction_rate=self._eviction_rate,
        )
        self._policy.compose(batch, context)
        return batch.build(self._waiting_order.update(batch))

    def commit(self, plan: StepPlan) -> None:
        """Take into account that ``plan``, the last one, is carried out."""
        for chunk in plan.prefills:
            if chunk.rid in self._queue:
                self._queue.take(chunk.rid)
        if plan.fairness is not None:
            self._waiting_order.commit(plan.fairness)
        if not plan.is_idle:
            change_s = plan.predicted_s - self._mean_iteration_s
            # The first plan sets the average, which has nothing to weigh against it yet.
            self._mean_iteration_s += change_s * (_ITERATION_WEIGHT if self._iteration else 1.0)
            self._iteration += 1
        self._arrival_rate.observe(plan.first_tokens)
        self._late_gaps.observe(plan.gaps)
        if self._arrival_wait is not None:
            self._arrival_wait.observe(
                plan.now_s,
                plan.predicted_s,
                plan.online_part_s,
                plan.first_tokens,
                plan.batch,
                fixed_s=fixed_s(self._model),
            )
        self._policy.commit(plan)

    def observe(self, batch: BatchStats, seconds: float) -> None:
        """Take a measured iteration into account; the model, if the configuration says to refine.

        Raises:
            InputFileError: the batch is empty or the time is not positive.
        """
        self._prediction_error.observe(self._model.predict(batch), seconds)
        if self._arrival_wait is not None:
            self._arrival_wait.measured(batch, seconds)
        if self._refiner is None:
            return
        self._observed.append(Sample(batch, seconds))
        if len(self._observed) == _REFINED_AT_ONCE:
            self._model = self._refiner.refine(*self._observed)
            self._observed.clear()

    def restore(self, rid: str, generated_tokens: int) -> None:
        """Let an evicted offline request wait again, with its progress.

        Raises:
            RequestError: no such request was taken from the queue.
        """
        self._queue.restore(rid, generated_tokens)
        self._eviction_rate += _EVICTION_WEIGHT * (1.0 - self._eviction_rate)

    def finish(self, rid: str) -> None:
        """Forget a request of either class that has ended, for whatever reason."""
        if self._queue.is_running(rid):
            self._eviction_rate -= _EVICTION_WEIGHT * self._eviction_rate
            self._queue.remove(rid)
        elif rid in self._queue:
            self._queue.remove(rid)

    def _margin(self) -> float:
        overrun = self._prediction_error.overrun
        return max(self._config.margin, min(overrun / (1 + overrun), _MOST_MARGIN))

    def _arrival_wait_s(self, snapshot: EngineSnapshot) -> float:
        if self._config.arrival_wait_s is not None:
            return self._config.arrival_wait_s
        if self._arrival_wait is None:
            return math.inf
        if snapshot.arrival_wait_share < 1:
            return self._arrival_wait.wait_until_safepoint_s(snapshot.arrival_wait_share)
        return self._arrival_wait.wait_s
