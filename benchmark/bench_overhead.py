"""Time of a scheduling pass beside many waiting offline requests: ours and stock SGLang's.

    python benchmark/bench_overhead.py --out benchmark/results/overhead_cpu.json

Every system is a real SGLang scheduler with a small model and the real event loop, in a
process of its own. 32 requests run (``--running``): a quarter of them online decodes, the others
offline requests of 64 prompt and 16 to 48 output tokens, so that in most steps one of them ends and
another begins.
More wait: behind our schedulers in the offline queue, with stock SGLang in its own.

The systems run in turn, some dozens of passes each, again and again, before more requests
are let wait. A pass is ``get_new_batch_prefill``. Ours has SGLang's own build the batch, and
takes finished requests out of the running one, which SGLang would do a moment later; what it
takes beyond that is our overhead. ``own`` is the time of a whole step in our overrides: the pass,
the launch, and what is noted of its results. A step lasts from one pass to the next. On a CPU,
where one
thread does all of this, it is that thread's CPU time that is measured: what else runs on the
machine does not count.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from common.own_process import OwnProcess
from common.results import write_results
from overhead_bench.engine import RUNNING, SYSTEMS, Pass, TimedEngine
from sglang_coserve.metrics import summarize
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from sglang_coserve.terminal import markdown_table, terminate_as_interrupt


def main() -> None:
    """Run the benchmark; print a table, write the figures."""
    options = parse_options()
    measured: dict[tuple[str, int], list[Pass]] = {}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        stack.enter_context(terminate_as_interrupt())
        model = options.model_path or make_small_model(Path(directory) / "model", SmallModelSpec())
        engines = {}
        for name in options.systems:
            system = SYSTEMS[name]
            system = replace(system, flags={**options.settings, **system.flags})
            engines[name] = stack.enter_context(
                OwnProcess(TimedEngine, system, model, options.running)
            )
        backends = {engine.call("attention_backend") for engine in engines.values()}
        turns = list(product(options.waiting, range(options.rounds), engines))
        for num_waiting, _, name in track(turns, console=Console(stderr=True), transient=True):
            passes = engines[name].call("run", num_waiting, options.passes, options.limit_s)
            measured.setdefault((name, num_waiting), []).extend(passes)
    rows = [
        summary(name, num_waiting, measured[name, num_waiting])
        for name in options.systems
        for num_waiting in sorted(options.waiting)
    ]
    print(table(rows))
    attention = ", ".join(sorted(backends))
    write_results(options.out, options, attention_backend=attention, rows=rows)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--systems", nargs="+", default=list(SYSTEMS)[:2], choices=SYSTEMS)
    add("--waiting", nargs="+", type=int, default=[100, 1000, 10_000, 100_000])
    add("--running", type=int, default=RUNNING, help="requests that run at a time")
    add("--rounds", type=int, default=3)
    add("--passes", type=int, default=100, help="of a system in a round")
    add("--limit-s", type=float, default=10.0, help="for them; at least 8 are made")
    add("--model-path", type=Path, help="default: a small random model")
    add("--settings", type=json.loads, default={}, metavar="JSON", help="ServerArgs of all")
    add("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


def summary(name: str, num_waiting: int, passes: list[Pass]) -> dict[str, Any]:
    """Return the figures of one system: medians, P99s and means in ms, and a share of the step.

    The share is of the whole pass with stock SGLang, and of all our own time with ours.
    """
    parts = {"pass": [p.pass_s for p in passes], "iteration": [p.step_s for p in passes]}
    if SYSTEMS[name].coserve is not None:
        parts["overhead"] = [p.pass_s - p.stock_s for p in passes]
        parts["own"] = [p.own_s for p in passes]
    added = parts.get("own", parts["pass"])
    return {
        "system": name,
        "waiting": num_waiting,
        "passes": len(passes),
        **{f"{part}_ms": summarize(times_s).to_dict() for part, times_s in parts.items()},
        "share": sum(added) / sum(parts["iteration"]),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the figures in ms, the share in percent."""
    shown = {"median": "p50", "P99": "p99", "mean": "mean"}
    headings = ["system", "waiting", "passes"]
    headings += [f"{part}: {name}" for part in ("pass", "overhead", "own") for name in shown]
    cells = [
        [
            row["system"],
            f"{row['waiting']:,}",
            str(row["passes"]),
            *(f"{row['pass_ms'][key]:.3f}" for key in shown.values()),
            *(
                f"{row[f'{part}_ms'][key]:.3f}" if f"{part}_ms" in row else ""
                for part in ("overhead", "own")
                for key in shown.values()
            ),
            f"{row['iteration_ms']['p50']:.1f}",
            f"{100 * row['share']:.2f}",
        ]
        for row in rows
    ]
    return markdown_table([*headings, "step", "share %"], cells, equal_widths=True)


if __name__ == "__main__":
    main()
