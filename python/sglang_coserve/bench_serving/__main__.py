"""``python -m sglang_coserve.bench_serving``: online and offline load on servers, compared."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sglang_coserve.errors import CoserveError
from sglang_coserve.extras import require
from sglang_coserve.interrupts import terminate_as_interrupt
from sglang_coserve.printable import printable


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    console = Console(stderr=True)

    def tell(text: str) -> None:
        said = printable(f"bench_serving: {text}")
        console.print(said, highlight=False, markup=False, soft_wrap=True)

    try:
        require("engine", "bench_serving")
        from sglang_coserve.bench_serving import report
        from sglang_coserve.bench_serving.compare import Comparison
        from sglang_coserve.bench_serving.options import parse_options

        options = parse_options(argv)
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
            task = progress.add_task("")
            comparison = Comparison(
                options, lambda text: progress.update(task, description=printable(text))
            )
            try:
                with terminate_as_interrupt():
                    comparison.run()
            finally:
                report.write(comparison, options.out, argv)
    except CoserveError as error:
        tell(str(error))
        return 2
    except KeyboardInterrupt:
        tell("interrupted; every process has ended, the same command goes on")
        return 130
    sys.stdout.write(report.table(comparison) + "\n")
    for name, reason in comparison.failed.items():
        tell(f"failed: {name}: {reason}")
    tell(f"written: {options.out} (table.md, results.json; logs and SGLang's own output in runs)")
    return 1 if comparison.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
