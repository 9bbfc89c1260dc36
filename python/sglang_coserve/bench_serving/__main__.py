"""``python -m sglang_coserve.bench_serving``: online and offline load on servers, compared."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sglang_coserve.errors import CoserveError, require
from sglang_coserve.terminal import INTERRUPTED, printable, terminate_as_interrupt

if TYPE_CHECKING:
    from sglang_coserve.bench_serving.compare import Comparison


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    console = Console(stderr=True)

    def tell(text: str) -> None:
        said = printable(f"bench_serving: {text}")
        console.print(said, highlight=False, markup=False, soft_wrap=True)

    def tell_failures() -> int:
        failed = {} if comparison is None else comparison.failed
        for name, reason in failed.items():
            tell(f"failed: {name}: {reason}")
        return len(failed)

    comparison: Comparison | None = None
    try:
        require("engine", "bench_serving")
        from sglang_coserve.bench_serving import compare
        from sglang_coserve.bench_serving.options import parse_options

        options = parse_options(argv)
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
            task = progress.add_task("")

            def show(text: str) -> None:
                if console.is_terminal:
                    progress.update(task, description=printable(text))
                else:
                    tell(text)

            comparison = compare.Comparison(options, show)
            try:
                with terminate_as_interrupt():
                    comparison.run()
            finally:
                compare.write(comparison, options.out, argv)
    except CoserveError as error:
        tell(str(error))
        return 2
    except KeyboardInterrupt:
        tell_failures()
        tell("interrupted; every process has ended, the same command goes on")
        return INTERRUPTED
    sys.stdout.write(compare.table(comparison) + "\n")
    failed = tell_failures()
    tell(f"written: {options.out} (table.md, results.json; logs and SGLang's own output in runs)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
