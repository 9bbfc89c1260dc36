"""``python -m sglang_coserve.demo``: what ``scripts/demo`` runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields

from rich.console import Console

from sglang_coserve.config.flags import FlagParser, add_flags
from sglang_coserve.errors import CoserveError, require
from sglang_coserve.terminal import INTERRUPTED, printable


def main(argv: Sequence[str]) -> int:
    """Run the demo; return its exit status."""
    console = Console()
    try:
        require("engine", "the demo")
        from sglang_coserve.demo.run import DemoOptions, run_demo
        from sglang_coserve.demo.table import as_table, cpu_lines
        from sglang_coserve.demo.verdict import sentence

        parser = FlagParser(
            prog="python -m sglang_coserve.demo",
            description="Serves an online trace alone, with an offline file on stock SGLang, and "
            "with it on ours.",
            epilog="Example: scripts/demo --slo-ttft-ms 300 --slo-tpot-ms 50",
        )
        add_flags(parser, fields(DemoOptions))
        options = DemoOptions(**vars(parser.parse_args(argv)))
        result = run_demo(options, console)
    except CoserveError as error:
        # Without a terminal it would be cut into lines of 80 characters, paths too.
        told = Console(stderr=True, soft_wrap=True)
        told.print(printable(f"demo: {error}"), highlight=False, markup=False)
        return 2
    except KeyboardInterrupt:
        Console(stderr=True).print("demo: interrupted; the server has ended")
        return INTERRUPTED
    console.print(as_table(result))
    for line in cpu_lines(result.systems):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(sentence(result), markup=False, highlight=False, soft_wrap=True)
    written = f"written: {options.out / 'report.json'}, {options.out / 'timeline.png'}"
    console.print(written, markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
