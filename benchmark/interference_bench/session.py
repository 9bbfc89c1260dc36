"""A session of ``bench_interference``: engines, their flags, one load for all."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from common.own_process import OwnProcess
from interference_bench.engine import CpuClockEngine
from interference_bench.load import TRAFFIC, Load
from interference_bench.outcome import RunOutcome
from interference_bench.report import figures
from interference_bench.systems import ALONE, SYSTEMS, EngineSystem
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from sglang_coserve.terminal import terminate_as_interrupt

MODEL: Final = SmallModelSpec(layers=12, hidden=128)


@contextmanager
def _engines(
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
                    CpuClockEngine,
                    system,
                    model,
                    options.core,
                    targets,
                    options.host_factor,
                    stops_when_idle=True,
                )
            )
            for name, system in systems.items()
        }


def measured(
    systems: Mapping[str, EngineSystem], options: argparse.Namespace
) -> Iterator[tuple[Mapping[str, float], Sequence[Mapping[str, Any]]]]:
    """Run systems under the same loads; yield the rates of full load and all rows so far.

    In each repeat all systems get the same requests, in a random order. No engine runs while the
    caller has its turn.
    """
    loads = [(kind, share) for kind in options.traffic for share in options.load]
    rates = {}
    with _engines({ALONE: SYSTEMS[ALONE]}, options) as running:
        for kind in options.traffic:
            print(f"{kind}: how many make what load", file=sys.stderr)
            # At a rate that leaves it idle for most of the time: more would share decode steps.
            alone: RunOutcome = running[ALONE].call(
                "run", Load(TRAFFIC[kind], 1.0, options.seconds, seed=99)
            )
            rates[kind] = len(alone.ttft_s) / alone.busy_s
    rows: list[dict[str, Any]] = []
    for kind, share in loads:
        # Each load has engines of its own, which remember no other traffic.
        with _engines(systems, options) as running:
            for repeat in range(options.repeats):
                load = Load(TRAFFIC[kind], share * rates[kind], options.seconds, seed=repeat)
                for name in random.Random(repeat).sample(list(systems), len(systems)):
                    print(f"{kind} at {share:.0%}, {repeat}: {name}", file=sys.stderr)
                    head = {"repeat": repeat, "traffic": kind, "load": share, "system": name}
                    own = load.beside(options) if systems[name].has_offline else load
                    outcome: RunOutcome = running[name].call("run", own)
                    rows.append({**head, **figures(outcome)})
                yield rates, rows
