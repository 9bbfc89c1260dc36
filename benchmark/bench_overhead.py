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

from rich.console import Console
from rich.progress import Progress

from common.own_process import OwnProcess
from common.results import write_results
from overhead_bench.engine import SYSTEMS, Pass, TimedEngine
from overhead_bench.report import print_table, summary
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from sglang_coserve.terminal import terminate_as_interrupt


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


if __name__ == "__main__":
    main()
