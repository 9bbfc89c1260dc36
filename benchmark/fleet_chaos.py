"""Kills, drains and hangs of engines and of the gateway: what is lost, doubled or different?

    python benchmark/fleet_chaos.py --minutes 60 --out fleet-chaos-report

Three engines and a gateway as processes, batches of several keys all the time, and with
``--router`` online requests through it. Greedy answers are known from an undisturbed engine; a
prompt whose answer rounding might change is left out. Engines and the gateway are killed, drained
and frozen, one after the other, and started again while the rest goes on. Writes
``results.json`` and ``table.md``; exits with 1 when a target is missed. Ctrl-C ends the injuries,
and the figures are those until then.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from chaos_bench.answers import KnownAnswer, known_answers
from chaos_bench.batch_load import BatchLoad, LineCounts
from chaos_bench.figures import Figure, exit_status, report
from chaos_bench.fleet_processes import INJURIES, FleetProcesses
from chaos_bench.prober import Prober, Probes
from chaos_bench.rounds import chaos_parser, hurt_in_rounds
from chaos_bench.router import Router
from chaos_bench.verdict import Verdict, online_verdict
from sglang_coserve.small_model import SmallModelSpec, make_small_model

_ROUTER_FLAGS: Final = ("--health-check-interval-secs", "1", "--disable-circuit-breaker")
"""As docs/fleet.md has them, but for the interval, with which every injury is noticed."""


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    options = parse_options(argv)
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> list[Figure]:
    """Hurt a fleet for as long as asked, and judge it."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        model = options.model_path or str(make_small_model(work / "model", SmallModelSpec()))
        flags = ["--model-path", model, "--log-level", "warning", *options.server_flag]
        fleet = FleetProcesses(
            options.engines,
            flags,
            work,
            spares_one=options.router is not None,
            seed=options.seed,
        )
        began_s = time.monotonic()
        with fleet:
            known = known_answers(fleet.engine_urls[0], options.known, options.seed)
            batches = BatchLoad(fleet.base_url, known, options)
            with ExitStack() as stack:
                online = _online_requests(stack, fleet, known, options)
                batches.start()
                start_s = time.monotonic()
                hurt_in_rounds(fleet.injure, options.injuries, options)
                batches.stop()
                counts = batches.results()
                span_s = time.monotonic() - start_s
                seen = online.stop() if online else None
            fleet.note_attempts()
        print(f"fleet_chaos: {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    answered = Verdict([], []) if seen is None else online_verdict(seen, fleet.kills)
    figures = [*_figures(fleet, counts, span_s), *answered.figures]
    examples = [*fleet.failures, *counts.examples[:20], *answered.examples]
    report(figures, options, examples, injuries=fleet.injuries)
    return figures


def _online_requests(
    stack: ExitStack,
    fleet: FleetProcesses,
    known: Sequence[KnownAnswer],
    options: argparse.Namespace,
) -> Prober | None:
    """Start a router and online requests, if asked for."""
    if options.router is None:
        return None
    log_path = options.out / "router.log"
    router = Router(options.router, "cache_aware", fleet.engine_urls, log_path, *_ROUTER_FLAGS)
    base_url = stack.enter_context(router).base_url
    probes = Probes(base_url, known, options.seed, arrivals_per_s=options.online_rate)
    online = Prober(probes)
    online.start()
    return online


def _figures(fleet: FleetProcesses, counts: LineCounts, span_s: float) -> list[Figure]:
    drains: dict[str, float] = {}
    if fleet.drains_s:
        drains = {"median": statistics.median(fleet.drains_s), "longest": max(fleet.drains_s)}
    return [
        *(Figure(name, count) for name, count in fleet.injuries.items()),
        Figure("engines that did not end or start as they should", len(fleet.failures), at_most=0),
        *(Figure(f"SIGTERM to end of process, {name}", s, "s") for name, s in drains.items()),
        *counts.figures(),
        Figure("lines given up", counts.given_up, at_most=0),
        Figure("attempts that ended with an engine", fleet.attempts["lost"]),
        Figure("attempts that were given back", fleet.attempts["moved"]),
        Figure("time", span_s, "s"),
    ]


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        SystemExit: argparse refused it, or printed its help.
    """
    parser = chaos_parser(__doc__ or "", "fleet-chaos-report", (2.0, 15.0), INJURIES)
    add = parser.add_argument
    add("--engines", type=int, default=3)
    add("--router", type=Path, help="the command smg: online requests go through it")
    add("--online-rate", type=float, default=1.0, help="online requests a second, on average")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
