"""How far is ``coserve what-if`` off? A change simulated, and then made.

    python benchmark/bench_what_if.py --out benchmark/results/what_if_cpu.json

A real engine on a clock of CPU time (``bench_interference``) records its plans under a load of
online requests and more offline ones than it can serve. From that alone ``what-if`` says what would
become of a change. Then another engine, with that change, is given the same load. Its own
recording is measured as the first one is: by the tokens that its scheduler saw.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench_interference import TRAFFIC
from common.results import write_results
from interference_bench.load import Load
from interference_bench.session import OFFLINE, engine_flags, engines
from interference_bench.systems import System
from sglang_coserve.core.control.slo import parse_slo
from sglang_coserve.metrics import latency_report
from sglang_coserve.simulator.recorded_traffic import RecordedTraffic, read_traffic
from sglang_coserve.simulator.what_if import Change, TrafficOutcome, compare_change

BEFORE: Final = "before"
SLOS: Final = ("ttft p99 <= 150ms", "tbt p99 <= 60ms")
BASE: Final[Mapping[str, Any]] = {"offline_policy": "coserve", "slo": SLOS}
TIGHTER: Final = ("ttft p99 <= 100ms", "tbt p99 <= 40ms")
CHANGES: Final[Mapping[str, tuple[Change, Mapping[str, Any]]]] = {
    "--policy hygen": (Change(policy="hygen"), {**BASE, "offline_policy": "hygen"}),
    " ".join(f"--slo '{slo}'" for slo in TIGHTER): (
        Change(slos=tuple(map(parse_slo, TIGHTER))),
        {**BASE, "slo": TIGHTER},
    ),
}
FIGURES: Final = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "offline_tokens")


def main() -> None:
    """Run the benchmark; print a table, write the figures."""
    options = parse_options()
    rows: list[dict[str, Any]] = []
    settings = {BEFORE: BASE} | {name: setting for name, (_, setting) in CHANGES.items()}
    with tempfile.TemporaryDirectory() as directory:
        paths = {name: Path(directory) / f"{n}.jsonl" for n, name in enumerate(settings)}
        systems = {
            name: System(coserve={**settings[name], "record_plans": str(paths[name])})
            for name in settings
        }
        load = Load(TRAFFIC["outputs"], options.rate, options.seconds, seed=0, **OFFLINE)
        load = replace(load, offline_in_flight=options.backlog)
        with engines(systems, options) as running, Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("running", total=len(running))
            for name, engine in running.items():
                bar.update(task, description=name)
                engine.call("run", load)
                bar.advance(task)
        recorded = read(paths[BEFORE])
        for name, (change, _) in CHANGES.items():
            found = compare_change(recorded, change)
            assert found is not None and found.changed is not None
            after = read(paths[name])
            outcomes = {
                "measured_before": found.recorded,
                "simulated_before": found.simulated,
                "simulated_after": found.changed,
                "measured_after": TrafficOutcome(
                    name, latency_report(after.timelines), after.offline_tokens
                ),
            }
            rows.append({"change": name} | {key: figures(each) for key, each in outcomes.items()})
    print_table(rows)
    write_results(options.out, options, rows=rows)


def read(path: Path) -> RecordedTraffic:
    """Return what was recorded until the engine was told to abort what was left."""

    def lines() -> Iterator[str]:
        with path.open() as file:
            for line in file:
                event = json.loads(line)
                if event.get("event") != "finished" or event["ending"] != "aborted":
                    yield line

    return read_traffic(lines(), str(path))


def figures(outcome: TrafficOutcome) -> dict[str, Any]:
    """Return the figures that are compared, by name; of a simulation, its single P99s, too."""
    ttft, itl = outcome.online.ttft, outcome.online.itl
    seconds = (ttft.p50_s, ttft.p99_s, itl.p50_s, itl.p99_s)
    values = [float("nan") if value is None else value * 1e3 for value in seconds]
    found: dict[str, Any] = dict(zip(FIGURES, (*values, outcome.offline_tokens), strict=True))
    if outcome.single:
        p99s_s = [report.itl.p99_s for report in outcome.single]
        found["single_itl_p99_ms"] = [None if each is None else each * 1e3 for each in p99s_s]
    return found


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what was predicted beside what then was measured."""
    table = Table(title="A change simulated (what-if), and then made")
    for heading in ("change", "figure"):
        table.add_column(heading)
    for heading in ("before: measured", "simulated", "after: simulated", "measured"):
        table.add_column(heading, justify="right")
    table.add_column("error", justify="right")
    for row in rows:
        kinds = ("measured_before", "simulated_before", "simulated_after", "measured_after")
        for name in FIGURES:
            before, simulated, changed, after = (row[kind][name] for kind in kinds)
            table.add_row(
                row["change"] if name == FIGURES[0] else "",
                name,
                *(f"{value:,.1f}" for value in (before, simulated, changed, after)),
                f"{changed / after - 1:+.0%}",
            )
        table.add_section()
    Console(width=150).print(table)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = engine_flags(__doc__, seconds=15.0)
    parser.add_argument("--rate", type=float, default=1.5, help="online requests a second")
    parser.add_argument("--backlog", type=int, default=400, help="offline requests that wait")
    return parser.parse_args()


if __name__ == "__main__":
    main()
