"""Time of a scheduling pass beside many waiting offline requests: ours and stock SGLang's.

    python benchmark/bench_overhead.py --out benchmark/results/overhead_cpu.json
    PROMETHEUS_MULTIPROC_DIR=$(mktemp -d) python benchmark/bench_overhead.py --waiting 1000 \
        --systems coserve fifo --settings '{"enable_metrics": true}'

Every system is a real SGLang scheduler with a small model and the real event loop, in a
process of its own. 32 requests run (``--running``): a quarter of them online decodes, the others
offline requests of 64 prompt and 16 to 48 output tokens, so that in most steps one of them ends
and another begins. More wait: behind our schedulers in the offline queue, with stock SGLang in
its own. With ``--online`` those are online requests that all came at once, and wait in SGLang's
queue everywhere.

The systems run in turn, some dozens of passes each, again and again, before more requests
are let wait. Timed is ``get_new_batch_prefill``. Ours has SGLang's own build the batch, and
takes finished requests out of the running one, which SGLang would do a moment later; what it
takes beyond that is our overhead: the account of the last step, the snapshot of the engine, the
plan, and the rest, which carries it out. "around" is what ours takes of a step outside of the pass.
A step lasts from one pass to the next. On a CPU, where one thread does all of this, it is that
thread's CPU time that is measured: what else runs on the machine does not count. "metrics" is what
gathering and publishing them takes of a step, with SGLang's ``enable_metrics`` as above.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from common.own_process import OwnProcess
from common.results import write_results
from overhead_bench.engine import SYSTEMS, Pass, TimedEngine
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from sglang_coserve.terminal import terminate_as_interrupt

_PARTS: Final = ("account", "snapshot", "plan", "rest", "around", "load")


def main() -> None:
    """Run the benchmark; print a table, write the figures."""
    options = parse_options()
    console = Console(stderr=True)
    measured: dict[tuple[str, int], list[Pass]] = {}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        stack.enter_context(terminate_as_interrupt())
        model = options.model_path or make_small_model(Path(directory) / "model", SmallModelSpec())
        engines = {}
        for name in options.systems:
            system = SYSTEMS[name]
            system = replace(system, flags={**options.settings, **system.flags})
            engines[name] = stack.enter_context(
                OwnProcess(TimedEngine, system, model, options.running, options.online)
            )
        with Progress(console=console, transient=True) as progress:
            num_steps = len(options.waiting) * len(engines) * (options.rounds + 1)
            bar = progress.add_task("", total=num_steps)
            for num_waiting in options.waiting:
                for name, engine in engines.items():
                    progress.update(bar, description=f"{name}: {num_waiting:,}", advance=1)
                    engine.call("fill", num_waiting)
                for _ in range(options.rounds):
                    for name, engine in engines.items():
                        progress.update(bar, description=f"{name}: {num_waiting:,}", advance=1)
                        passes = engine.call("run", num_waiting, options.passes, options.limit_s)
                        measured.setdefault((name, num_waiting), []).extend(passes)
    rows = [
        summary(name, options.running, num_waiting, measured[name, num_waiting])
        for name in options.systems
        for num_waiting in sorted(options.waiting)
    ]
    print_table(rows)
    write_results(options.out, options, rows=rows)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS)[:3], choices=SYSTEMS)
    parser.add_argument("--waiting", nargs="+", type=int, default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--running", type=int, default=32, help="requests that run at a time")
    parser.add_argument(
        "--online", action="store_true", help="online requests wait, not offline ones"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=100, help="of a system in a round")
    parser.add_argument("--limit-s", type=float, default=10.0, help="for them; at least 8 are made")
    parser.add_argument("--model-path", type=Path, help="default: a small random model")
    parser.add_argument(
        "--settings", type=json.loads, default={}, metavar="JSON", help="ServerArgs of every system"
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


def summary(name: str, running: int, num_waiting: int, passes: list[Pass]) -> dict[str, Any]:
    """Return the figures of one system; times in ms."""
    whole_s = [sum(p.spent_s.values()) for p in passes]
    parts = {"pass": whole_s, "iteration": [p.iteration_s for p in passes]}
    if SYSTEMS[name].policy is not None:
        stock_s = [p.spent_s.get("stock", 0.0) for p in passes]
        parts["overhead"] = [
            one_s - of_it_s for one_s, of_it_s in zip(whole_s, stock_s, strict=True)
        ]
        for part in ("account", "snapshot", "plan", "rest"):
            parts[part] = [p.spent_s.get(part, 0.0) for p in passes]
        parts["around"] = [p.around_s["around"] + p.around_s["metrics"] for p in passes]
        parts["load"] = [p.around_s["load"] for p in passes]
    added = parts.get("overhead", parts["pass"])
    return {
        "system": name,
        "running": running,
        "waiting": num_waiting,
        "passes": len(passes),
        **{f"{part}_ms": statistics_ms(times_s) for part, times_s in parts.items()},
        "metrics_share": sum(p.around_s["metrics"] for p in passes) / sum(parts["iteration"]),
        "share": sum(added) / sum(parts["iteration"]),
    }


def statistics_ms(times_s: list[float]) -> dict[str, float]:
    """Return the median, the P99 and the mean."""
    times_ms = np.array(times_s) * 1e3
    return {
        "median": float(np.median(times_ms)),
        "p99": float(np.percentile(times_ms, 99)),
        "mean": float(times_ms.mean()),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the figures in ms, the share in percent."""
    table = Table(title="Scheduling pass, ms")
    headings = ["system", "running", "waiting", "passes", "median", "P99", "mean", "ours: median"]
    headings += ["P99", "mean", *_PARTS, "iteration", "share %", "metrics %"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for row in rows:
        whole, ours = row["pass_ms"], row.get("overhead_ms")
        names = ("median", "p99", "mean")
        table.add_row(
            row["system"],
            f"{row['running']}",
            f"{row['waiting']:,}",
            str(row["passes"]),
            *(f"{whole[name]:.3f}" for name in names),
            *(f"{ours[name]:.3f}" if ours else "" for name in names),
            *(f"{row[f'{part}_ms']['median']:.3f}" if ours else "" for part in _PARTS),
            f"{row['iteration_ms']['median']:.1f}",
            f"{100 * row['share']:.2f}",
            f"{100 * row['metrics_share']:.2f}",
        )
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
