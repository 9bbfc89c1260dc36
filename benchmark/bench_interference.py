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
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress

from common import stock
from common.own_process import OwnProcess
from common.results import write_results
from interference_bench.engine import Outcome
from interference_bench.load import Load, OnlineTraffic
from interference_bench.report import print_table, row
from interference_bench.session import engine_flags, engines, full_rate_per_s
from interference_bench.systems import ALONE, SYSTEMS, System
from sglang_coserve.errors import ConfigError

TRAFFIC: Final[Mapping[str, OnlineTraffic]] = {
    "prompts": OnlineTraffic((32, 256), (1, 4)),
    "outputs": OnlineTraffic((32, 256), (8, 48)),
}


def main() -> None:
    """Run the benchmark; print a table, write the figures."""
    options = parse_options()
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    names = [ALONE, *options.systems, *([f"{options.systems[0]}, again"] if options.aa else [])]
    systems = {name: SYSTEMS[name.removesuffix(", again")] for name in names}
    with engines(systems, options) as running, Progress(console=console) as progress:
        bar = progress.add_task("running", total=None)
        loads = [(kind, share) for kind in options.traffic for share in options.load]
        progress.update(bar, total=options.repeats * len(loads) * len(names) + len(options.traffic))
        rates: dict[str, float] = {}
        if options.rates_of:
            rates = json.loads(options.rates_of.read_text())["requests_per_s_at_full_load"]
        for kind in [kind for kind in options.traffic if kind not in rates]:
            progress.update(bar, description=f"{kind}: how many make what load")
            rates[kind] = full_rate_per_s(running[ALONE], TRAFFIC[kind], options.seconds)
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
                            **row(run(running[name], systems[name], load)),
                        }
                    )
                    progress.advance(bar)
                write_results(options.out, options, requests_per_s_at_full_load=rates, rows=rows)
    print_table(rows, names)


def run(engine: OwnProcess, system: System, load: Load) -> Outcome:
    """Let an engine have a load, or its online requests where it gets no others."""
    if not system.has_offline:
        load = replace(load, offline_prompt_tokens=0, offline_in_flight=0)
    outcome: Outcome = engine.call("run", load)
    return outcome


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = engine_flags(__doc__, seconds=60.0)
    known = [name for name in SYSTEMS if name != ALONE]
    interleaved = {name for name in known if "prefill_decode_interval" in SYSTEMS[name].flags}
    usual = [
        name
        for name in known
        if not name.startswith("coserve, ")
        and (name not in interleaved or stock.has_decode_interval())
    ]
    parser.add_argument("--systems", nargs="+", choices=known, default=usual)
    parser.add_argument("--traffic", nargs="+", choices=TRAFFIC, default=list(TRAFFIC))
    parser.add_argument("--load", nargs="+", type=float, default=[0.2, 0.5, 0.8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--offline", nargs=2, type=int, default=[512, 32], metavar="TOKENS")
    parser.add_argument("--in-flight", type=int, default=16, help="offline requests")
    parser.add_argument("--aa", action="store_true", help="run the first system twice")
    parser.add_argument(
        "--rates-of",
        type=Path,
        metavar="JSON",
        help="an earlier --out: what load a request makes is taken from there, so that two "
        "versions get the same requests",
    )
    options = parser.parse_args()
    for name in interleaved.intersection(options.systems):
        try:
            stock.require_decode_interval(name)
        except ConfigError as error:
            parser.error(str(error))
    return options


if __name__ == "__main__":
    main()
