"""What offline work costs online requests, and what it gets: engines on a clock of CPU time.

    python benchmark/bench_interference.py --repeats 3 --out interference.json

Every system is a real scheduler, model and event loop in one thread of a process of its own.
Its clock is the CPU time of that thread, so that other work on the machine counts only by
what it does to caches. Online requests arrive as a Poisson process, also in the middle of a
step; offline requests wait at any time. HTTP, tokenizing and the threads of a server are not
in it: ``bench_coserve`` has those.

The rate of online requests is chosen so that online requests alone keep the engine busy for
the given share of the time. All systems of a repeat get the same requests, one after the
other in a random order; ratios are taken within a repeat. ``--aa`` runs the first system
twice, which shows the noise. "coserve, stock's P99s ÷ 1.4" has P99 targets of what the best of
the stock systems in the same command got at the same load, divided by 1.4.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
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
from interference_bench.report import held_to_stock, print_table, row
from interference_bench.session import engine_flags, engines, full_rate_per_s
from interference_bench.systems import ALONE, SYSTEMS, System
from sglang_coserve.errors import ConfigError

RATES: Final = "requests_per_s_at_full_load"
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
    loads = [(kind, share) for kind in options.traffic for share in options.load]
    rates = json.loads(options.rates_of.read_text())[RATES] if options.rates_of else {}
    missing = [kind for kind in options.traffic if kind not in rates]
    with Progress(console=console) as progress:
        num_runs = options.repeats * len(loads) * len(names) + len(missing)
        bar = progress.add_task("running", total=num_runs)
        if missing:
            with engines({ALONE: SYSTEMS[ALONE]}, options) as running:
                for kind in missing:
                    progress.update(bar, description=f"{kind}: how many make what load")
                    rates[kind] = full_rate_per_s(running[ALONE], TRAFFIC[kind], options.seconds)
                    progress.advance(bar)
        for kind, share in loads:
            # Each load has engines of its own, which remember no other traffic.
            for of_turn in turns(systems, rows, kind, share):
                with engines(of_turn, options) as running:
                    for repeat in range(options.repeats):
                        load = load_of(options, kind, share * rates[kind], repeat)
                        for name in random.Random(repeat).sample(list(of_turn), len(of_turn)):
                            progress.update(bar, description=f"{kind} at {share:.0%}: {name}")
                            head = {"repeat": repeat, "traffic": kind, "load": share}
                            figures = row(run(running[name], of_turn[name], load))
                            rows.append({**head, "system": name, **figures})
                            progress.advance(bar)
                write_results(options.out, options, **{RATES: rates}, rows=rows)
    print_table(rows, names)


def turns(
    systems: Mapping[str, System], rows: Sequence[Mapping[str, Any]], kind: str, share: float
) -> Iterator[Mapping[str, System]]:
    """Yield the systems that run together: those held to what stock SGLang got come last."""
    yield {name: system for name, system in systems.items() if system.stock_share is None}
    held = {name: system for name, system in systems.items() if system.stock_share is not None}
    if held:
        of_load = [one for one in rows if (one["traffic"], one["load"]) == (kind, share)]
        yield {name: held_to_stock(system, of_load) for name, system in held.items()}


def load_of(options: argparse.Namespace, kind: str, rate_per_s: float, repeat: int) -> Load:
    """Return what all systems of a repeat get."""
    return Load(
        TRAFFIC[kind],
        rate_per_s,
        options.seconds,
        seed=repeat,
        offline_prompt_tokens=options.offline[0],
        offline_output_tokens=options.offline[1],
        offline_in_flight=options.in_flight,
    )


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
    held = [name for name in options.systems if SYSTEMS[name].stock_share is not None]
    if held and not any(SYSTEMS[name].coserve is None for name in options.systems):
        parser.error(f"{held[0]!r} needs a stock system among --systems")
    for name in interleaved.intersection(options.systems):
        try:
            stock.require_decode_interval(name)
        except ConfigError as error:
            parser.error(str(error))
    return options


if __name__ == "__main__":
    main()
