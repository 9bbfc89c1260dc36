"""The same online requests for several systems, at several loads, again and again."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress

from common.own_process import OwnProcess
from interference_bench.engine import Outcome
from interference_bench.load import Load, OnlineTraffic
from interference_bench.session import engine_flags, engines, full_rate_per_s
from interference_bench.systems import ALONE, System

__all__ = ["Swept", "sweep", "sweep_flags"]

TRAFFIC: Final[Mapping[str, OnlineTraffic]] = {
    "prompts": OnlineTraffic((32, 256), (1, 4)),
    "outputs": OnlineTraffic((32, 256), (8, 48)),
}


@dataclass(frozen=True, slots=True)
class Swept:
    """One load of one repeat."""

    place: Mapping[str, Any]
    """``repeat``, ``traffic`` and ``load``, for the rows of the figures."""

    outcomes: Mapping[str, Outcome]
    """By system, in the order in which they ran."""

    rates_per_s: Mapping[str, float]
    """By kind of traffic, the rate of online requests that is full load."""


def sweep_flags(description: str) -> argparse.ArgumentParser:
    """Return a command line with the flags of ``sweep``."""
    parser = engine_flags(description, seconds=60.0)
    parser.add_argument("--traffic", nargs="+", choices=TRAFFIC, default=list(TRAFFIC))
    parser.add_argument("--load", nargs="+", type=float, default=[0.2, 0.5, 0.8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--offline", nargs=2, type=int, default=[512, 32], metavar="TOKENS")
    parser.add_argument("--in-flight", type=int, default=16, help="offline requests")
    parser.add_argument(
        "--rates-of",
        type=Path,
        metavar="JSON",
        help="an earlier --out: what load a request makes is taken from there, so that two "
        "versions get the same requests",
    )
    return parser


def sweep(systems: Mapping[str, System], options: argparse.Namespace) -> Iterator[Swept]:
    """Run every system, ``ALONE`` among them, with every load, in a random order each time."""
    with engines(systems, options) as running, Progress(console=Console(stderr=True)) as progress:
        loads = [(kind, share) for kind in options.traffic for share in options.load]
        runs = options.repeats * len(loads) * len(systems)
        bar = progress.add_task("running", total=runs + len(options.traffic))
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
                outcomes = {}
                for name in random.Random(repeat).sample(list(systems), len(systems)):
                    progress.update(bar, description=f"{kind} at {share:.0%}: {name}")
                    outcomes[name] = _run(running[name], systems[name], load)
                    progress.advance(bar)
                place = {"repeat": repeat, "traffic": kind, "load": share}
                yield Swept(place, outcomes, rates)


def _run(engine: OwnProcess, system: System, load: Load) -> Outcome:
    """Run a load, or its online requests alone where the system gets no others."""
    if not system.has_offline:
        load = replace(load, offline_prompt_tokens=0, offline_in_flight=0)
    outcome: Outcome = engine.call("run", load)
    return outcome
