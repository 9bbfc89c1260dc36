"""A real scheduler that runs offline requests to their end, and stops some of their steps."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common.schedulers import run_loop, start_scheduler
from common.tokenized_request import tokenized_request
from interference_bench.engine import CPU_SETTINGS, settings_of
from interference_bench.systems import EngineSystem
from sglang_coserve.srt.emulation.device_clock import VirtualTime

__all__ = ["SuspendedEngine", "SuspensionRun"]

_SYSTEM: Final = EngineSystem(
    # Targets that no step misses: it stops where the benchmark says, and nowhere else.
    coserve={"safepoint_interval": 1, "slo_ttft_ms": 1e6, "slo_tpot_ms": 1e6},
    flags={"max_total_tokens": 16_384, "disable_radix_cache": True},
)


@dataclass(frozen=True, slots=True)
class SuspensionRun:
    """What a run brought."""

    costs_s: list[float]
    """From the end of the last layer before a stop to the beginning of the next layer."""

    prompts: dict[str, list[int]]
    outputs: dict[str, list[int]]
    leaked_tokens: int
    """KV slots that were free before the run and are not after it."""


class SuspendedEngine:
    """For ``OwnProcess``; on one core, and a clock of its CPU time."""

    def __init__(self, model: Path, core: int) -> None:
        os.sched_setaffinity(0, {core})
        os.environ["OMP_NUM_THREADS"] = "1"
        self._clock = VirtualTime()
        self._clock.install()
        settings, coserve = settings_of(_SYSTEM, {})
        self._scheduler = start_scheduler(model, {**CPU_SETTINGS, **settings}, coserve)
        runner = self._scheduler.parts.runner
        assert runner.safepoints is not None, runner.why_no_safepoints
        self._outputs: dict[str, list[int]] = {}
        self._rng = random.Random(0)
        self._probability = 0.0
        self._costs_s: list[float] = []
        self._stop_at_random(runner)
        self._collect_outputs()

    def close(self) -> None:
        """Leave everything to the end of the process."""

    def run(self, lengths: Sequence[int], output_tokens: int, probability: float) -> SuspensionRun:
        """Run prompts of these lengths, the same in every run, all at once.

        Every pass of the lane is stopped before a random one of the layers that it has left
        with ``probability``, if that is not its first.
        """
        scheduler, rng = self._scheduler, random.Random(1)
        vocabulary = range(10, int(scheduler.model_config.vocab_size))
        prompts = {
            f"offline-{number}": rng.choices(vocabulary, k=length)
            for number, length in enumerate(lengths)
        }
        messages = [
            tokenized_request(scheduler.tokenizer, rid, prompt, output_tokens, offline=True)
            for rid, prompt in prompts.items()
        ]
        self._outputs.clear()
        self._costs_s.clear()
        self._rng.seed(2)
        self._probability = probability

        def receive() -> list[Any]:
            arrived, messages[:] = list(messages), []
            scheduler.gracefully_exit = not arrived and scheduler.is_fully_idle()
            return arrived

        allocator = scheduler.token_to_kv_pool_allocator
        free = allocator.available_size()
        run_loop(scheduler, receive)
        leaked = free - allocator.available_size()
        return SuspensionRun(list(self._costs_s), prompts, dict(self._outputs), leaked)

    def _stop_at_random(self, runner: Any) -> None:
        from sglang_coserve.srt.safepoint.layers import decoder_layers

        gate = runner.safepoints.gate
        layers = decoder_layers(self._scheduler.tp_worker.model_runner.model)
        start, target, resumed, stopped_s = runner.lane.start, -1, -1, 0.0

        def start_and_choose(batch: Any) -> Any:
            nonlocal target, resumed
            first, outputs = start(batch)
            later = range(first + 1, len(layers))
            stops = bool(later) and self._rng.random() < self._probability
            target = self._rng.choice(later) if stops else -1
            resumed = first or -1
            return first, outputs

        def begins(number: int) -> None:
            nonlocal resumed
            if number == resumed:
                self._costs_s.append(self._clock() - stopped_s)
                resumed = -1

        def has_run(number: int) -> None:
            nonlocal stopped_s
            if number + 1 == target and gate.attention[0]:
                gate._flag.raise_for(gate.attention[0])
                stopped_s = self._clock()

        runner.lane.start = start_and_choose
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, number=number: begins(number))
            layer.register_forward_hook(lambda *_, number=number: has_run(number))

    def _collect_outputs(self) -> None:
        process = self._scheduler.process_batch_result

        def collecting(batch: Any, result: Any) -> None:
            reqs = list(batch.reqs)
            process(batch, result)
            for req in reqs:
                self._outputs[req.rid] = list(req.output_ids)

        self._scheduler.process_batch_result = collecting
