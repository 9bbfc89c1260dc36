"""A real engine on an emulated device, with what was launched on it and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from interference_bench.engine import CpuClockEngine, RunOutcome
from interference_bench.load import Load
from interference_bench.systems import EngineSystem
from sglang_coserve.core.step import StepResult

__all__ = ["Observed", "ObservedEngine", "Work"]


class Work(NamedTuple):
    """What was launched on a stream."""

    stream: str
    """``forward``, or another."""

    begin_s: float
    end_s: float
    forward_free_s: float
    """When the forward passes launched before it have run."""


@dataclass(slots=True)
class Observed:
    """What was seen in a run."""

    work: list[Work] = field(default_factory=list)
    passes: int = 0
    passes_ahead: int = 0
    """Those whose launch began before the device had run the last one."""

    barriers: int = 0
    open_barriers: int = 0
    """Those after which work of the scheduler could begin before the pass has ended."""

    results: list[StepResult] = field(default_factory=list)
    safepoints: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: Mapping[str, Any] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)


class ObservedEngine(CpuClockEngine):
    """For ``OwnProcess``; host work takes no time, so that runs repeat."""

    def __init__(self, system: EngineSystem, model: Path, flags: Mapping[str, Any]) -> None:
        super().__init__(system, model, 0, {"slo_ttft_ms": 300.0, "slo_tpot_ms": 30.0}, 0.0, flags)
        self._observed = Observed()
        self._watch_launches()
        self._watch_passes()
        if system.coserve is not None:
            self._watch_steps()

    def observed_run(self, load: Load) -> tuple[RunOutcome, Observed]:
        """Run a load; return what it brought and what was seen."""
        self._observed = Observed()
        outcome = self.run(load)
        if self._system.coserve is not None:
            parts = self._scheduler.parts
            self._observed.safepoints = parts.runner.state()["safepoints"]
            self._observed.checkpoints = parts.checkpointing.stats().to_dict()
        return outcome, self._observed

    def _watch_launches(self) -> None:
        from sglang_coserve.srt.emulation.device_module import EmulatedStream

        launch, forward = EmulatedStream.launch, self._scheduler.forward_stream

        def watched(stream: Any, seconds: float) -> None:
            free_s = forward.free_s
            launch(stream, seconds)
            name = "forward" if stream is forward else f"stream {id(stream)}"
            end_s = stream.free_s
            self._observed.work.append(Work(name, end_s - seconds, end_s, free_s))

        EmulatedStream.launch = watched  # type: ignore[method-assign]

    def _watch_passes(self) -> None:
        scheduler = self._scheduler
        run, apply = scheduler.run_batch, scheduler._apply_war_barrier
        process = scheduler.process_batch_result

        def watched(*arguments: Any, **named: Any) -> Any:
            self._observed.passes += 1
            self._observed.passes_ahead += scheduler.forward_stream.free_s > self._clock()
            return run(*arguments, **named)

        def applied() -> None:
            apply()
            self._observed.barriers += 1
            behind = scheduler.schedule_stream.free_s >= scheduler.forward_stream.free_s
            self._observed.open_barriers += not behind

        def processed(batch: Any, result: Any) -> None:
            reqs = list(batch.reqs)
            process(batch, result)
            for req in reqs:
                self._observed.outputs[req.rid] = list(req.output_ids)

        scheduler.run_batch = watched
        scheduler._apply_war_barrier = applied
        scheduler.process_batch_result = processed

    def _watch_steps(self) -> None:
        tracker = self._scheduler.parts.admission._steps
        next_pass = tracker.next_pass

        def watched(*arguments: Any) -> list[StepResult]:
            results: list[StepResult] = next_pass(*arguments)
            self._observed.results += results
            return results

        tracker.next_pass = watched
