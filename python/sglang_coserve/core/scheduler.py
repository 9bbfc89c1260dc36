"""The scheduler: one plan per step, by the same code for the engine and the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from sglang_coserve.core.advisory import Advisory
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.interference import Interference
from sglang_coserve.core.control.shadow_kv import UNPROTECTED, Protection, ShadowKv
from sglang_coserve.core.control.slo import Slo
from sglang_coserve.core.latency_model.model import LatencyModel, Sample
from sglang_coserve.core.learned_model import MOST_RESERVE, LearnedModel, PredictionError
from sglang_coserve.core.learned_times import MovingMean, OfflineShape, ServiceTime
from sglang_coserve.core.offline_queue import OfflineQueue, PackedTokens, QueuedRequest
from sglang_coserve.core.planning.lanes import (
    is_late_behind,
    is_stuck,
    longest_s,
    offline_left_s,
    reaches_safepoint,
    stop_share,
    waits_in_vain,
)
from sglang_coserve.core.planning.step_builder import PlanContext, StepBuilder
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.request import Ending
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import EngineSnapshot, PrefixCache, RequestInfo, SuspendedStep
from sglang_coserve.core.step import Bound, Lane, PrefillChunk, StepPlan, StepResult
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.core.work_log import WorkLog

_NO_TOKENS: Final = PackedTokens(b"")

_RESUME_WEIGHT: Final = 1 / 64
"""Weight of one step in the mean cost of a suspension: as many as average an error of the latency
model of twice the cost down to a quarter of it."""


class Scheduler:
    """Plans each step, and learns from its result.

    The caller asks for a ``plan`` and carries it out. It calls ``start`` once it knows
    which of the planned prefills were admitted, and ``update`` when the step has ended or was
    dropped: exactly one result for each started step. It also calls ``arrived`` for each
    online request, ``restore`` for each offline request that was retracted, and ``finish`` for
    each request that ended, after the result with its last token. ``plan`` changes no state, so a
    plan may be discarded and asked for again. Between ``start`` and ``update`` a step is in
    flight; further plans may be made and started meanwhile. The same calls give the same plans.
    """

    def __init__(
        self,
        policy: Policy,
        model: LatencyModel,
        slos: Sequence[Slo],
        config: SchedulerConfig | None = None,
        *,
        engine: EngineSize | None = None,
        profile_mape: float | None = None,
        advisory: Advisory | None = None,
    ) -> None:
        """Start without requests.

        Args:
            policy: A new instance, because policies keep state.
            model: Predicts the time of steps; ``update`` may correct it.
            slos: Latency targets of online requests.
            config: Settings that all policies share.
            engine: Limits of the engine, for the no-interference baseline.
            profile_mape: Mean absolute percentage error of the fit of ``model``, as a fraction.
            advisory: Calls what judges and learns; without it, errors there are raised.
        """
        self._advisory = advisory or Advisory()
        self._policy = policy
        self._config = config or SchedulerConfig()
        self.interference = Interference(
            slos, model, engine, stream_slowdown=self._config.stream_slowdown
        )
        """Latencies of online requests compared with the no-interference baseline."""

        self._advisory.without("judgement", self.interference.stop)
        self._allowance = self.interference.allowance
        self.queue = OfflineQueue(policy.queue_config(self._config.seed))
        """The waiting offline requests."""

        refines = self._config.refine
        self._learned = LearnedModel(model, refines=refines, profile_mape=profile_mape)
        self._learned_alone = LearnedModel(model, refines=refines)
        """Learned only from steps without offline work; predicts the steps of the baseline."""

        self._mixes_decodes = engine is not None and engine.mixes_decodes
        self._service_time = ServiceTime()
        self._offline_shape = OfflineShape()
        self._resume_s = MovingMean(_RESUME_WEIGHT)
        """What suspended steps took beyond their predicted time, per suspension. Without this the
        latency model would have to learn it, which predicts steps that are not suspended, too."""

        self._added_s = 0.0
        """What the last step added to the TTFT of requests that wait now, with all the steps
        before it in which some waited."""

        self._next_step = 0
        self._in_flight: dict[int, StepPlan] = {}
        """Started plans by step number."""

        self.work = WorkLog()

    @property
    def model(self) -> LatencyModel:
        """The latency model, as refined so far."""
        return self._learned.model

    @property
    def prediction_error(self) -> PredictionError:
        """Error of the model's predictions, each made before it was corrected by that step."""
        return self._learned.error

    def online_lease_s(self, now_s: float) -> float:
        """Return for how many seconds the engine should keep a prefix of an online request after
        its last use, while it has another prefix to evict."""
        kv = self._protected_kv
        return 0.0 if kv is None else kv.lease_s(self.interference.judged_s(now_s))

    def protection(self, now_s: float) -> Protection:
        """Return the KV that offline requests leave to the prefixes of online requests."""
        kv = self._protected_kv
        # Prefixes that are not followed any more would only seem ever older.
        return UNPROTECTED if kv is None else kv.protection(self.interference.judged_s(now_s))

    @property
    def _protected_kv(self) -> ShadowKv | None:
        return self.interference.kv if self._policy.protects_prefixes else None

    @property
    def fillable_share(self) -> float:
        """Share, 0 to 1, of a step with online decodes that offline work may fill."""
        slowdown = self._config.stream_slowdown
        if slowdown is None or self._allowance.targets.token_s is not None:
            return 1.0
        return slowdown / (1 + slowdown)

    def arrived(self, info: RequestInfo, token_ids: PackedTokens = _NO_TOKENS) -> None:
        """Record the arrival of an online request; to be called in order of arrival. O(1).

        Requests that are not reported here are left out of the baseline and of all learning.
        ``token_ids`` is the prompt; empty if unknown, and then no prefix is found for it.
        """
        beside_offline = self.queue.num_running > 0
        self._advisory.tell(
            "judgement",
            *(self.interference.arrived, info, token_ids),
            beside_offline=beside_offline,
        )

    def add_offline(self, request: QueuedRequest) -> None:
        """Add an offline request to the queue, with a prediction of how long it will run.

        Raises:
            RequestError: a request with this rid waits or runs already.
        """
        service_s = self._service_time.predict(request, self.model)
        self.queue.add(replace(request, estimated_service_s=service_s))

    def cached(self, rid: str, cached_tokens: int) -> None:
        """Record how many tokens of a waiting offline request's prompt the prefix cache holds.

        They come from an online request or from an offline one that has ended. Does nothing if
        the request does not wait. O(prompt tokens).
        """
        self.queue.cached(rid, cached_tokens)

    def no_room(self, rid: str) -> None:
        """Record that the engine refused a planned offline request although nothing else runs.

        The engine reserves more memory than a plan does, and may still have room for a shorter
        request: the others are planned before this one until one of them is admitted. O(1).
        """
        self.queue.no_room(rid)

    def flushed(self) -> None:
        """Record that the engine has emptied its prefix cache, as it would have alone."""
        self.interference.flushed()

    def plan(self, snapshot: EngineSnapshot, cache: PrefixCache) -> StepPlan:
        """Return the plan of the next step, without changing any state.

        O(requests + waiting online requests), whatever waits in the offline queue.
        """
        shared = StepBuilder(self._context(snapshot, cache))
        if snapshot.stop_share == 1.0 or not self._policy.is_preemptive:
            return self._compose(shared).build()
        left_s = offline_left_s(shared)
        if snapshot.suspended is None:
            if left_s is None:
                return self._compose(shared).build()
            return self._compose_offline(shared).build(snapshot.begins_s + left_s)
        if left_s is not None and reaches_safepoint(shared, left_s):
            return self._resume(snapshot.suspended, snapshot.begins_s + left_s)
        if waits_in_vain(shared):
            return StepPlan(step=self._next_step, drops=True)
        has_prompts = shared.has_online_prompts
        can_resume = not is_stuck(shared)
        # Otherwise no part of the suspended step fits between two decodes, and paused
        # offline decodes may join the online ones.
        if has_prompts or can_resume:
            shared.keep_paused()
        if can_resume and not has_prompts:
            shared.limit_offline(0.0, Bound.SUSPENDED)
        if self._compose(shared).memory.lacks_kv:
            return StepPlan(step=self._next_step, drops=True)
        return shared.build()

    def must_suspend(self, ends_s: float, arrivals: Sequence[RequestInfo], now_s: float) -> bool:
        """Return whether a step of the offline lane is to be suspended for online ``arrivals``.

        ``ends_s`` is when it is predicted to end. Changes nothing; may be called in any thread.
        """
        if not self._policy.lets_arrivals_wait:
            return True
        return is_late_behind(ends_s, arrivals, now_s, self.model, self._allowance.targets.ttft_s)

    def start(self, plan: StepPlan, chunks: Sequence[PrefillChunk]) -> None:
        """Record that a plan is carried out, with exactly these of its prefills.

        The chunks may differ in length from the planned ones if the cache has changed meanwhile.
        The offline requests among them leave the queue. A plan can be started only once, and
        only while no later plan has been started. O(chunks).
        """
        assert plan.step == self._next_step, f"step {plan.step} is not {self._next_step}, the next"
        planned = {chunk.rid for chunk in plan.prefills}
        assert {chunk.rid for chunk in chunks} <= planned, f"step {plan.step} has other prefills"
        self._next_step += 1
        self._in_flight[plan.step] = plan
        for chunk in chunks:
            if chunk.rid in self.queue:
                self.queue.take(chunk.rid)
                self._offline_shape.started()
        before_s = self._added_s if plan.waits_online else 0.0
        self._added_s = before_s + plan.added_s

    def update(self, result: StepResult) -> None:
        """Learn from the result of a step in flight. O(online requests of the step).

        Nothing is learned from a step that ran nothing or was dropped. From a step without a plan
        only its duration and the times of its online tokens are learned.

        Raises:
            InputFileError: the measured time is not positive.
        """
        plan = None
        if result.step is not None:
            assert result.step in self._in_flight, f"step {result.step} is not in flight"
            plan = self._in_flight.pop(result.step)
        # Requests are where they are, whatever is learned from here on.
        tell = self._advisory.tell
        online_s, offline_s = self._advisory.ask(
            "latency model", lambda: self._split(plan, result), (0.0, 0.0)
        )
        tell("work log", self.work.ended, plan, result, online_s, offline_s)
        if plan is not None and result.batch.is_empty:
            return
        tell("judgement", self._learn_from_tokens, result, offline_s)
        tell("service time", self._service_time.observe, result, is_busy=self.queue.num_running > 0)
        if result.batch.is_empty:
            return
        tell("offline shape", self._offline_shape.computed, result)
        if plan is not None:
            tell("policy", self._policy.update, plan, result)
        if result.seconds is not None:
            tell("latency model", self._learn_time, result, result.seconds)

    def restore(self, rid: str, generated_tokens: int) -> None:
        """Put a retracted offline request back into the queue, with its progress.

        Raises:
            RequestError: no such request was taken from the queue.
        """
        request = replace(self.queue.running(rid), num_generated_tokens=generated_tokens)
        service_s = self._service_time.predict(request, self.model)
        self.queue.restore(replace(request, estimated_service_s=service_s))
        self._policy.retracted()

    def finish(
        self,
        rid: str,
        ending: Ending = Ending.COMPLETE,
        *,
        token_ids: PackedTokens = _NO_TOKENS,
        output_tokens: int = 0,
    ) -> None:
        """Remove a request of either class that has ended.

        ``token_ids`` are the prompt and output of an online request; empty if unknown, and then
        later requests do not find the output. ``output_tokens`` is the length of the output.
        """
        self._advisory.tell("judgement", self.interference.ended, rid, ending, token_ids)
        if self.queue.is_running(rid):
            if ending is Ending.COMPLETE:
                self._offline_shape.ended(output_tokens)
            self._policy.finished()
            self.queue.remove(rid)
        elif rid in self.queue:
            self.queue.remove(rid)

    def _resume(self, suspended: SuspendedStep, until_s: float) -> StepPlan:
        """Return the plan that resumes a suspended step, which may run until ``until_s``."""
        return StepPlan(
            step=suspended.step,
            lane=Lane.OFFLINE,
            resumes=True,
            until_s=until_s,
            batch=suspended.batch,
            predicted_s=(1 - suspended.done_share) * self.model.predict(suspended.batch),
        )

    def _compose_offline(self, shared: StepBuilder) -> StepBuilder:
        """Compose a step of the offline lane, where nothing of the shared one is there."""
        seen = shared.snapshot
        most_s = longest_s(shared)

        def within(budget_s: float) -> StepBuilder:
            batch = StepBuilder(shared.context, Lane.OFFLINE)
            batch.limit_offline(budget_s, Bound.LANE)
            return self._compose(batch)

        alone = within(most_s / seen.stop_share)
        if alone.predicted_s > most_s and stop_share(alone.stats, seen) == 1:
            # Without a prefill it cannot be suspended and would run to its end.
            alone = within(most_s)
        if alone.stats.is_empty and (seen.admitted or len(self.queue)):
            # Even the smallest batch exceeds the budget, and one has to run.
            alone = within(math.inf)
        return alone

    def _compose(self, batch: StepBuilder) -> StepBuilder:
        """Let the policy add the work of the next step to ``batch``; return it."""
        self._policy.compose(batch)
        return batch

    def _smallest_step_s(self) -> float:
        """Return the seconds that the smallest step of offline work takes, with a reserve.

        A smaller bound would compose no step, and in the offline lane then a step without a limit.
        """
        smallest = StepStats.of([(2 * self._config.min_chunk_tokens, 0)])
        return (1 + MOST_RESERVE) * self.model.predict(smallest)

    def _context(self, snapshot: EngineSnapshot, cache: PrefixCache) -> PlanContext:
        if not self.interference.is_judging:
            self._allowance.tighten(self._smallest_step_s())
        resume_s = self._resume_s
        return PlanContext(
            snapshot=snapshot,
            model=self.model,
            config=self._config,
            queue=self.queue,
            cache=cache,
            allowance=self._allowance,
            victims=self._policy.victims,
            step=self._next_step,
            prompt_s=max(self._allowance.arrival_s - self._added_s, 0.0),
            resume_s=max(resume_s.value, 0.0) if resume_s.count else snapshot.resume_s,
            offline_shape=self._offline_shape,
            protection=self.protection(snapshot.now_s),
            decodes_alone=self.interference.decodes_alone,
            timely=1 / (1 + self._learned.error.reserve),
            averages_tpot=self._policy.averages_tpot,
            is_plain=self._allowance.is_relative
            and not self.queue.num_running
            and not len(self.queue),
            mixes_decodes=self._mixes_decodes,
        )

    def _split(self, plan: StepPlan | None, result: StepResult) -> tuple[float, float]:
        """Return the seconds of a step spent on online and on offline requests; in a pipeline, its
        share."""
        if result.batch.is_empty:
            return 0.0, 0.0
        seconds = result.seconds
        if seconds is None:
            seconds = self._learned.predict_now(result.batch)
        seconds /= result.concurrency
        if plan is None or not result.has_offline:
            return seconds, 0.0
        if plan.lane is Lane.OFFLINE:
            return 0.0, seconds
        online_s = min(plan.online_part_s / result.concurrency, seconds)
        return online_s, seconds - online_s

    def _learn_time(self, result: StepResult, seconds: float) -> None:
        """Correct the latency models, or the cost of suspending, by the measured time of a step."""
        if result.suspensions:
            predicted_s = self._learned.predict_now(result.batch)
            self._resume_s.add((seconds - predicted_s) / result.suspensions)
            return
        self._learned.observe(Sample(result.batch, seconds), result.overlapping)
        if not result.has_offline:
            alone = Sample(result.batch, seconds - result.planning_s)
            self._learned_alone.observe(alone, result.overlapping)

    def _learn_from_tokens(self, result: StepResult, offline_s: float) -> None:
        """Record when online requests got their tokens, and advance the baseline."""
        interference = self.interference
        interference.worked(offline_s, result.jobs)
        for rid, tokens in result.online_chunks:
            interference.computed(rid, tokens)
        for info, token_s in result.served:
            if token_s is not None:
                interference.produced(info.rid, token_s)
        interference.advance(self._learned_alone.predict_now, result.started_s)
