"""What offline work costs online requests, and what it gets: engines on a clock of CPU time.

    python benchmark/bench_interference.py --repeats 3 --out benchmark/results/interference_cpu.json

Every system is a real scheduler, model and event loop in one thread of a process of its own.
Its clock is the CPU time of that thread, so that other work on the machine counts only by
what it does to caches. Online requests arrive as a Poisson process, also in the middle of a
step; offline requests wait at any time. HTTP, tokenizing and the threads of a server are not
in it: ``bench_coserve`` has those.

The rate of online requests is chosen so that online requests alone keep the engine busy for
the given share of the time. All systems of a repeat get the same requests, one after the
other in a random order; ratios are taken within a repeat. ``--aa`` runs the first system
twice, which shows the noise.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress

from coserve_bench.machine import describe_machine
from interference_bench.engine import Engine, Outcome
from interference_bench.load import Load, OnlineTraffic
from interference_bench.report import print_table, row
from interference_bench.systems import ALONE, SYSTEMS
from own_process import OwnProcess
from sglang_coserve.interrupts import terminate_as_interrupt
from sglang_coserve.small_model import SmallModelSpec, make_small_model

TRAFFIC: Final[Mapping[str, OnlineTraffic]] = {
    "prompts": OnlineTraffic((32, 256), (1, 4)),
    "outputs": OnlineTraffic((32, 256), (8, 48)),
}
MODEL: Final = SmallModelSpec(layers=12, hidden=128)


def main() -> None:
    """Run the benchmark; print a table, write the figures."""
    options = parse_options()
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        stack.enter_context(terminate_as_interrupt())
        model = options.model_path or make_small_model(Path(directory) / "model", MODEL)
        names = [ALONE, *options.systems, *([f"{options.systems[0]}, again"] if options.aa else [])]
        progress = stack.enter_context(Progress(console=console))
        bar = progress.add_task("starting", total=None)
        engines = {}
        targets = {"slo_ttft_ms": options.ttft_ms, "slo_tpot_ms": options.tpot_ms}
        for name in names:
            system = SYSTEMS[name.removesuffix(", again")]
            progress.update(bar, description=f"starting {name}")
            engines[name] = stack.enter_context(
                OwnProcess(Engine, system, model, options.core, targets, stands_still=True)
            )
        loads = [(kind, share) for kind in options.traffic for share in options.load]
        progress.update(bar, total=options.repeats * len(loads) * len(names) + len(options.traffic))
        rates: dict[str, float] = {}
        if options.rates_of:
            rates = json.loads(options.rates_of.read_text())["requests_per_s_at_full_load"]
        for kind in [kind for kind in options.traffic if kind not in rates]:
            progress.update(bar, description=f"{kind}: how many make what load")
            rates[kind] = busy_requests_per_s(engines[ALONE], TRAFFIC[kind], options.seconds)
            progress.advance(bar)
        for repeat in range(options.repeats):
            for kind, share in loads:
                load = Load(
                    TRAFFIC[kind],
                    share * rates[kind],
                    options.seconds,
                    seed=repeat,
                    offline_prompt_tokens=options.offline[0],
                    offline_output_tokens=options.offline[1],
                    offline_in_flight=options.in_flight,
                )
                order = random.Random(repeat).sample(names, len(names))
                for name in order:
                    progress.update(bar, description=f"{kind} at {share:.0%}: {name}")
                    rows.append(
                        {
                            "repeat": repeat,
                            "traffic": kind,
                            "load": share,
                            "system": name,
                            **row(run(engines[name], name, load)),
                        }
                    )
                    progress.advance(bar)
                if options.out:
                    write(options, rates, rows)
    print_table(rows, names)
    if options.out:
        write(options, rates, rows)


def run(engine: OwnProcess, name: str, load: Load) -> Outcome:
    """Let an engine have a load, or its online requests where it gets no others."""
    if not SYSTEMS[name.removesuffix(", again")].has_offline:
        load = replace(load, offline_prompt_tokens=0, offline_in_flight=0)
    outcome: Outcome = engine.call("run", load)
    return outcome


def busy_requests_per_s(engine: OwnProcess, traffic: OnlineTraffic, seconds: float) -> float:
    """Return how many online requests a second would keep the engine busy all the time.

    By a run at a rate that leaves it idle for most of the time; more requests at a time would
    share their decode steps.
    """
    outcome: Outcome = engine.call("run", Load(traffic, 1.0, seconds, seed=99))
    return len(outcome.ttft_s) / outcome.busy_s


def write(
    options: argparse.Namespace, rates: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Write the figures so far."""
    paths = ("out", "model_path", "rates_of")
    settings = {**vars(options), **{name: str(vars(options)[name]) for name in paths}}
    document = {
        "machine": describe_machine(),
        "settings": settings,
        "requests_per_s_at_full_load": dict(rates),
        "rows": list(rows),
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = [name for name in SYSTEMS if name != ALONE]
    usual = [name for name in known if not name.startswith("coserve, ") and SYSTEMS[name].can_run]
    parser.add_argument("--systems", nargs="+", choices=known, default=usual)
    parser.add_argument("--traffic", nargs="+", choices=TRAFFIC, default=list(TRAFFIC))
    parser.add_argument("--load", nargs="+", type=float, default=[0.2, 0.5, 0.8])
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU time a run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--offline", nargs=2, type=int, default=[512, 32], metavar="TOKENS")
    parser.add_argument("--in-flight", type=int, default=16, help="offline requests")
    parser.add_argument("--ttft-ms", type=float, default=100.0)
    parser.add_argument("--tpot-ms", type=float, default=50.0)
    parser.add_argument("--core", type=int, default=0, help="all systems run on this one")
    parser.add_argument("--aa", action="store_true", help="run the first system twice")
    parser.add_argument("--model-path", type=Path, help="default: 12 layers of width 128")
    parser.add_argument(
        "--rates-of",
        type=Path,
        metavar="JSON",
        help="an earlier --out: what load a request makes is taken from there, so that two "
        "versions get the same requests",
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    for name in options.systems:
        if not SYSTEMS[name].can_run:
            parser.error(f"--systems {name!r} needs SGLang {SYSTEMS[name].since} or later")
    return options


if __name__ == "__main__":
    main()
