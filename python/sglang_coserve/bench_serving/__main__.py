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
        from sglang_coserve.bench_serving.options import Options, parse_options

        options = parse_options(argv)
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
            task = progress.add_task("")

            def compared(rate: float | None, of_rate: Options) -> Comparison:
                at = "" if rate is None else f"{rate:g} requests/s, "
                return Comparison(
                    of_rate, lambda text: progress.update(task, description=printable(at + text))
                )

            loads = options.of_each_rate()
            comparisons = {rate: compared(rate, of_rate) for rate, of_rate in loads.items()}
            try:
                with terminate_as_interrupt():
                    for comparison in comparisons.values():
                        comparison.run()
            finally:
                report.write(comparisons, options.out, argv)
    except CoserveError as error:
        tell(str(error))
        return 2
    except KeyboardInterrupt:
        tell("interrupted; every process has ended, the same command goes on")
        return 130
    sys.stdout.write(report.table(comparisons) + "\n")
    failed = 0
    for rate, comparison in comparisons.items():
        for name, reason in comparison.failed.items():
            failed += 1
            tell(f"failed: {name if rate is None else f'{name} at {rate:g}/s'}: {reason}")
    tell(f"written: {options.out} (table.md, results.json; logs and SGLang's own output in runs)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
