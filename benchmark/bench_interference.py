"""What offline work costs online requests, and what it gets: engines on a clock of CPU time.

    python benchmark/bench_interference.py --repeats 3 --out interference.json

Every system is a real scheduler, model and event loop in one thread of a process of its own.
Its clock is the CPU time of that thread, so that other work on the machine counts only by
what it does to caches. Online requests arrive as a Poisson process, also in the middle of a
step; offline requests wait at any time. HTTP, tokenizing and the threads of a server are not
in it: ``sglang_coserve.bench_serving`` has those.

The rate of online requests is chosen so that online requests alone keep the engine busy for
the given share of the time. All systems of a repeat get the same requests, one after the
other in a random order; ratios are taken within a repeat.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final

from common.own_process import OwnProcess
from common.results import write_results
from interference_bench.engine import CpuClockEngine
from interference_bench.load import TRAFFIC, Load, add_engine_options, load_parser
from interference_bench.outcome import RunOutcome
from interference_bench.report import figures, table
from interference_bench.systems import ALONE, SYSTEMS, EngineSystem
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from sglang_coserve.terminal import terminate_as_interrupt

MODEL: Final = SmallModelSpec(layers=12, hidden=128)


def main() -> None:
    """Run the benchmark; print a table, write the figures."""
    options = parse_options()
    systems = {name: SYSTEMS[name] for name in (ALONE, *options.systems)}
    rates = full_rates_per_s(options)
    rows: list[dict[str, Any]] = []
    for kind, share in product(options.traffic, options.load):
        # Each load has engines of its own, which remember no other traffic.
        with engines_of(systems, options) as engines:
            for repeat in range(options.repeats):
                load = Load(TRAFFIC[kind], share * rates[kind], options.seconds, seed=repeat)
                for name in random.Random(repeat).sample(list(systems), len(systems)):
                    print(f"{kind} at {share:.0%}, {repeat}: {name}", file=sys.stderr)
                    head = {"repeat": repeat, "traffic": kind, "load": share, "system": name}
                    own = load.beside(options) if systems[name].has_offline else load
                    rows.append({**head, **figures(engines[name].call("run", own))})
                write_results(options.out, options, requests_per_s_at_full_load=rates, rows=rows)
    print(table(rows, list(systems)))


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = load_parser(__doc__, TRAFFIC)
    add_engine_options(parser)
    parser.set_defaults(
        traffic=["prompts", "outputs"],
        repeats=3,
        seconds=60.0,
        offline=[512, 32],
        in_flight=16,
        host_factor=1.0,
    )
    add = parser.add_argument
    add("--ttft-ms", type=float, default=100.0, help="P99 target")
    add("--tpot-ms", type=float, default=50.0, help="P99 target of gaps")
    add("--model-path", type=Path, help="instead of 12 layers of width 128")
    add("--out", type=Path, help="write the figures as JSON")
    known = [name for name in SYSTEMS if name != ALONE]
    usual = [name for name in known if not name.startswith("coserve, ")]
    add("--systems", nargs="+", choices=known, default=usual)
    return parser.parse_args()


@contextmanager
def engines_of(
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


def full_rates_per_s(options: argparse.Namespace) -> dict[str, float]:
    """Return how many requests of each traffic keep an engine busy."""
    rates = {}
    with engines_of({ALONE: SYSTEMS[ALONE]}, options) as engines:
        for kind in options.traffic:
            print(f"{kind}: how many make what load", file=sys.stderr)
            # At a rate that leaves it idle for most of the time: more would share decode steps.
            load = Load(TRAFFIC[kind], 1.0, options.seconds, seed=99)
            alone: RunOutcome = engines[ALONE].call("run", load)
            rates[kind] = len(alone.online) / alone.busy_s
    return rates


if __name__ == "__main__":
    main()
