"""Online and offline load on one engine: ours, stock SGLang and what bounds both.

    python benchmark/bench_coserve.py --out results

Runs every system in turn, several times, on one machine, and writes tables and
figures; the same command again continues where it was stopped. docs/benchmarks.md
says what is measured and how.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from coserve_bench.comparison import Comparison, RateSearches
from coserve_bench.options import Options, parse_options
from coserve_bench.plan import RunKey
from coserve_bench.runner import Runner
from sglang_coserve.errors import CoserveError
from sglang_coserve.interrupts import terminate_as_interrupt


async def run(options: Options, console: Console) -> dict[str, str]:
    """Make all runs and write what came of them, also after an interruption.

    Returns the runs that failed, and why.
    """
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TextColumn("{task.fields[phase]}")),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("runs", total=None, phase="")

        def started(key: RunKey, number: int, total: int) -> None:
            progress.update(bar, description=key.name, completed=number, total=total, phase="")

        runner = Runner(options, lambda phase: progress.update(bar, phase=phase))
        kind = RateSearches if options.ooco else Comparison
        task = kind(options, runner)
        try:
            await task.run(started)
        finally:
            await runner.close()
            console.print(task.report())
    return task.failed


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    console = Console(stderr=True)
    try:
        options = parse_options(argv)
        with terminate_as_interrupt():
            failed = asyncio.run(run(options, console))
    except CoserveError as error:
        console.print(f"bench_coserve: {error}", highlight=False, markup=False)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(
            "bench_coserve: interrupted; the servers have ended, the same command goes on"
        )
        return 130
    for name, reason in failed.items():
        console.print(f"failed: {name}: {reason}", highlight=False, markup=False)
    console.print(f"written: {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
