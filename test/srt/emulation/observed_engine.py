"""A real engine on an emulated device, with what was launched on it and when."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from interference_bench.engine import CpuClockEngine
from interference_bench.load import Load
from interference_bench.outcome import RunOutcome
from interference_bench.systems import EngineSystem
from sglang_coserve.core.step import StepResult
from sglang_coserve.srt.forward_kind import has_online_prompts
from sglang_coserve.srt.steps.step_record import StepRecord

TARGETS_MS: Final[Mapping[str, float]] = {"slo_ttft_ms": 300.0, "slo_tpot_ms": 30.0}
"""Of ours."""


@dataclass(frozen=True, slots=True)
class Given:
    """What is special in a run."""

    reads_early: bool = False
    """Passes say that they have read the scheduler's memory before their first layer, as those do
    that run in CUDA graphs."""

    resume_s: float = 0.0
    """What the device takes to go on with a suspended step."""

    aborts_suspended: bool = False
    """Clients abort a request of each step that is suspended."""

    runs_ahead: bool = False
    """The host plans a step as soon as the last one is launched, as where no plan says how long
    that one takes."""


class Work(NamedTuple):
    """What was launched on a stream."""

    stream: str
    """``forward``, ``to host``, ``to device``, or another."""

    begin_s: float
    end_s: float
    forward_free_s: float
    """When the forward passes launched before it have run."""


class Suspensible(NamedTuple):
    """A pass that might be suspended."""

    until_s: float
    """By when it had to stop."""

    begin_s: float
    """When the device could begin."""

    group_s: float
    """What the layers between two safepoints take."""

    free_s: float
    """When the device has run what was launched of it."""


@dataclass(slots=True)
class Observed:
    """What was seen in a run."""

    work: list[Work] = field(default_factory=list)
    passes: int = 0
    passes_ahead: int = 0
    """Those whose launch began before the device had run the last one."""

    beside_s: list[float] = field(default_factory=list)
    """How long the device was still to run then, or less than 0 if it idled; on ours, where it
    runs a planned step."""

    first_late_s: list[float] = field(default_factory=list)
    """How long after the end of a pass with online prompts its results were processed."""

    barriers: int = 0
    open_barriers: int = 0
    """Those after which work of the scheduler could begin before the pass has ended."""

    drops_in_flight: int = 0
    """Suspended steps that were dropped while the device still ran a part of them."""

    open_drops: int = 0
    """Those after which work of the scheduler could begin before that part has ended."""

    suspensible: list[Suspensible] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    safepoints: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: Mapping[str, Any] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)


class ObservedEngine(CpuClockEngine):
    """For ``OwnProcess``; host work takes no time, so that runs repeat."""

    def __init__(self, system: EngineSystem, model: Path, flags: Mapping[str, Any]) -> None:
        super().__init__(system, model, 0, TARGETS_MS, 0.0, flags)
        self._observed = Observed()
        self._given = Given()
        self._to_abort: list[str] = []
        self._watch_launches()
        self._watch_passes()
        if system.coserve is not None:
            self._watch_steps()
            self._watch_lane()

    def observed_run(self, load: Load, given: Given = Given()) -> tuple[RunOutcome, Observed]:
        """Run a load; return what it brought and what was seen."""
        self._observed, self._given = Observed(), given
        if given.runs_ahead:
            self._scheduler._rank_clock.pacer = None
        outcome = self.run(load)
        if self._system.coserve is not None:
            parts = self._scheduler.parts
            self._observed.safepoints = parts.lane.safepoints.state()["safepoints"]
            self._observed.checkpoints = parts.kv_store.figures()
        return outcome, self._observed

    def learned_resume_s(self, default_s: float) -> float:
        """What a suspension costs by what the core has learned; ``default_s`` before it has."""
        learned = self._scheduler.parts.admission.core._resume_s
        return float(learned.value) if learned.count else default_s

    def _arrived(self, now_s: float) -> list[Any]:
        from sglang.srt.managers.io_struct import AbortReq

        rids, self._to_abort = self._to_abort, []
        return [*super()._arrived(now_s), *(AbortReq(rid=rid) for rid in rids)]

    def _watch_launches(self) -> None:
        from sglang_coserve.srt import compat
        from sglang_coserve.srt.emulation.device_module import EmulatedStream

        launch, forward = EmulatedStream.launch, self._scheduler.forward_stream
        names = {forward: "forward"}
        controller = getattr(self._scheduler.tree_cache, "cache_controller", None)
        if controller is not None:
            to_host, to_device = compat.copy_streams(controller)
            names |= {to_host: "to host", to_device: "to device"}

        def watched(stream: Any, seconds: float) -> None:
            free_s = forward.free_s
            launch(stream, seconds)
            end_s = stream.free_s
            name = names.get(stream, "other")
            self._observed.work.append(Work(name, end_s - seconds, end_s, free_s))

        EmulatedStream.launch = watched  # type: ignore[method-assign]

    def _watch_passes(self) -> None:
        scheduler = self._scheduler
        run, apply = scheduler.run_batch, scheduler._apply_war_barrier
        process = scheduler.process_batch_result

        def watched(*arguments: Any, **named: Any) -> Any:
            self._observed.passes += 1
            beside_s = scheduler.forward_stream.free_s - self._clock()
            self._observed.passes_ahead += beside_s > 0
            if self._is_end_known():
                self._observed.beside_s.append(beside_s)
            begin = scheduler.forward_stream.record_event()
            result = run(*arguments, **named)
            if self._given.reads_early:
                scheduler.model_worker.last_shared_read_runner.shared_read_done_event = begin
            return result

        def applied() -> None:
            apply()
            self._observed.barriers += 1
            self._observed.open_barriers += self._is_schedule_open()

        def processed(batch: Any, result: Any) -> None:
            reqs = list(batch.reqs)
            done = getattr(result, "copy_done", None)
            if done is not None and has_online_prompts(batch):
                self._observed.first_late_s.append(self._clock() - done.time_s)
            process(batch, result)
            for req in reqs:
                self._observed.outputs[req.rid] = list(req.output_ids)

        scheduler.run_batch = watched
        scheduler._apply_war_barrier = applied
        scheduler.process_batch_result = processed

    def _is_end_known(self) -> bool:
        clock = getattr(self._scheduler, "_rank_clock", None)
        pacer = None if clock is None else clock.pacer
        return pacer is None or math.isfinite(pacer._ends_s)

    def _is_schedule_open(self) -> bool:
        """Whether work of the scheduler could begin before the passes launched so far end."""
        scheduler = self._scheduler
        return bool(scheduler.schedule_stream.free_s < scheduler.forward_stream.free_s)

    def _watch_steps(self) -> None:
        tracker = self._scheduler.parts.admission._steps
        next_pass = tracker.next_pass

        def watched(*arguments: Any) -> list[StepRecord]:
            records: list[StepRecord] = next_pass(*arguments)
            self._observed.results += [record.result for record in records]
            return records

        tracker.next_pass = watched

    def _watch_lane(self) -> None:
        from sglang_coserve.srt.steps.offline_lane import SUSPENDED

        lane, forward = self._scheduler.parts.lane, self._scheduler.forward_stream
        model = self._scheduler.tp_worker.model_runner.model
        placed = lane.safepoints.state()["safepoints"]
        group_share = placed["interval_layers"] / placed["layers"]
        run, start, drop = lane.run, lane.start, lane.drop

        def ran(batch: Any, stops: Any, launch: Any) -> Any:
            begin_s, before_s = max(self._clock(), forward.free_s), model.launched_s
            result = run(batch, stops, launch)
            if stops is not None:
                group_s = (model.launched_s - before_s) * group_share
                seen = Suspensible(stops.until_s, begin_s, group_s, forward.free_s)
                self._observed.suspensible.append(seen)
            if result is SUSPENDED and self._given.aborts_suspended:
                self._to_abort.append(lane.suspended.batch.reqs[0].rid)
            return result

        def started(batch: Any) -> Any:
            if lane.suspended is not None:
                forward.launch(self._given.resume_s)
            return start(batch)

        def dropped() -> Any:
            in_flight = forward.free_s > self._clock()
            result = drop()
            self._observed.drops_in_flight += in_flight
            self._observed.open_drops += in_flight and self._is_schedule_open()
            return result

        lane.run, lane.start, lane.drop = ran, started, dropped
