"""What the benchmarks on a clock of CPU time share: engines, their flags, the rate of full load."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from common.own_process import OwnProcess
from interference_bench.engine import CpuClockEngine, RunOutcome
from interference_bench.load import Load, OnlineTraffic
from interference_bench.systems import EngineSystem
from sglang_coserve.interrupts import terminate_as_interrupt
from sglang_coserve.small_model import SmallModelSpec, make_small_model

__all__ = ["OFFLINE", "engine_flags", "engines", "full_rate_per_s"]

MODEL: Final = SmallModelSpec(layers=12, hidden=128)
OFFLINE: Final[Mapping[str, Any]] = {
    "offline_prompt_tokens": 512,
    "offline_output_tokens": 32,
    "offline_in_flight": 16,
}
"""Fields of ``Load``: offline requests that never end."""


def engine_flags(description: str, seconds: float) -> argparse.ArgumentParser:
    """Return a command line with the flags of all these benchmarks."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add = parser.add_argument
    add("--seconds", type=float, default=seconds, help="of CPU time a run")
    add("--ttft-ms", type=float, default=100.0)
    add("--tpot-ms", type=float, default=50.0)
    add("--core", type=int, default=0, help="all systems run on this one")
    add("--model-path", type=Path, help="default: 12 layers of width 128")
    add("--out", type=Path, help="write the figures as JSON")
    return parser


@contextmanager
def engines(
    systems: Mapping[str, EngineSystem], options: argparse.Namespace
) -> Iterator[dict[str, OwnProcess]]:
    """Start an engine of each system; each is stopped while it is not asked for anything."""
    targets: dict[str, Any] = {"slo_ttft_ms": options.ttft_ms, "slo_tpot_ms": options.tpot_ms}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        stack.enter_context(terminate_as_interrupt())
        model = options.model_path or make_small_model(Path(directory) / "model", MODEL)
        yield {
            name: stack.enter_context(
                OwnProcess(
                    CpuClockEngine, system, model, options.core, targets, stops_when_idle=True
                )
            )
            for name, system in systems.items()
        }


def full_rate_per_s(engine: OwnProcess, traffic: OnlineTraffic, seconds: float) -> float:
    """Return how many online requests a second would keep the engine busy all the time.

    By a run at a rate that leaves it idle for most of the time; more requests at a time would
    share their decode steps.
    """
    outcome: RunOutcome = engine.call("run", Load(traffic, 1.0, seconds, seed=99))
    return len(outcome.ttft_s) / outcome.busy_s
