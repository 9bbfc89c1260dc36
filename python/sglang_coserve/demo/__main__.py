"""``python -m sglang_coserve.demo``: what ``scripts/demo`` runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sglang_coserve.errors import CoserveError
from sglang_coserve.metrics import SloTargets
from sglang_coserve.terminal import printable


def demo(
    seconds: Annotated[
        float,
        typer.Option(help="How long all three windows take together; set-up comes on top."),
    ] = 60.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Ours alone, in a third of the time.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Online trace: Azure CSV, BurstGPT CSV or Mooncake JSONL."),
    ] = None,
    offline: Annotated[
        Path | None, typer.Option(help="Offline requests: JSONL in OpenAI's batch format.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where report.json and timeline.png go.")] = Path(
        "demo-report"
    ),
    model: Annotated[
        Path | None, typer.Option(help="A model of your own; default: a small random one.")
    ] = None,
    emulate: Annotated[
        str | None,
        typer.Option(
            metavar="HARDWARE",
            help="At the pace of Llama-3.1-8B on a GPU that is emulated: h100, a100, h200, b200 "
            "or ascend-910c.",
        ),
    ] = None,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="Online TTFT target of ours, ms; default: its defaults.")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(help="Online TPOT target of ours, ms.")
    ] = None,
    server_flag: Annotated[
        list[str] | None, typer.Option(help="A further flag for our server; repeatable.")
    ] = None,
) -> None:
    """Serve an online trace alone, with an offline file on stock SGLang, and with it on ours."""
    from sglang_coserve.demo.report import as_table, sentence
    from sglang_coserve.demo.run import DemoOptions, run_demo

    console = Console()
    options = DemoOptions(
        seconds=seconds,
        trace=trace,
        offline=offline,
        out=out,
        model=model,
        emulate=emulate,
        targets=SloTargets.of_ms(slo_ttft_ms, slo_tpot_ms),
        is_quick=quick,
        server_flags=tuple(server_flag or ()),
    )
    result = run_demo(options, console)
    console.print(as_table(result))
    console.print(sentence(result), markup=False, highlight=False, soft_wrap=True)
    written = f"written: {out / 'report.json'}, {out / 'timeline.png'}"
    console.print(written, markup=False, soft_wrap=True)


def main() -> int:
    """Run the demo; return its exit status."""
    try:
        typer.run(demo)
    except CoserveError as error:
        # Without a terminal it would be cut into lines of 80 characters, paths too.
        told = Console(stderr=True, soft_wrap=True)
        told.print(printable(f"demo: {error}"), highlight=False, markup=False)
        return 2
    except KeyboardInterrupt:
        Console(stderr=True).print("demo: interrupted; the server has ended")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
