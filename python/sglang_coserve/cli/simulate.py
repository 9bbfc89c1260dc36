"""``coserve simulate``: modelled machines, before buying real ones."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from sglang_coserve.cli.console import ExitCode, Quiet, code_of_signal, flag, say, takes

if TYPE_CHECKING:
    from sglang_coserve.simulator.observer import RunControl
    from sglang_coserve.simulator.options import SimulationOptions


@dataclass(frozen=True)
class SimulationFlags:
    """The fields of ``SimulationOptions``, without importing it."""

    hardware: str = flag("h100", "a100, h100, h200, b200 or ascend-910c.")
    model: str = flag("llama-3.1-8b", "A known name such as llama-3.1-70b, or a config.json.")
    tp_size: int = flag(1, "Devices that share the model.", min=1)
    slo_ttft_ms: float | None = flag(
        None, "Target for the time to first token.", "--slo-ttft-ms", "--slo-ttft-p99-ms"
    )
    slo_tpot_ms: float | None = flag(
        None, "Target for the time per output token.", "--slo-tpot-ms", "--slo-tpot-p99-ms"
    )
    rate: float = flag(1.0, "Factor of the online arrival rate.")
    max_running: int = flag(256, "Requests that may hold KV.", min=1)
    seed: int = flag(0, "Same seed, same result.")
    trace: Path | None = flag(
        None,
        "Online requests: a trace in Azure's, BurstGPT's or Mooncake's format. Default: the"
        " bundled sample.",
    )
    offline: str | None = flag(
        None,
        "Offline requests: a JSONL batch file, a trace, lengths such as 4096x256 for an endless"
        " backlog, or none. Default: the bundled sample.",
    )
    backlog: int = flag(
        256, "Offline requests kept waiting; 0: they come at their trace's times.", min=0
    )
    policy: str = flag(
        "online_only,coserve", "Policies to compare on the same workload.", metavar="NAME,…"
    )
    slo: list[str] | None = flag(
        None,
        "SLOs instead of targets, as of a server: 'ttft p99 <= 300ms', or relative to online"
        " requests alone: 'tbt p99 <= +10%'.",
        metavar="SLO…",
    )
    duration: float | None = flag(None, "Simulated seconds. Default: the whole trace.", metavar="S")
    profile: Path | None = flag(
        None, "Latency profile to plan with. Default: a roofline from the datasheet."
    )
    true_profile: Path | None = flag(None, "How long steps really take. Default: as planned.")
    kv_capacity_tokens: int | None = flag(
        None, "KV slots. Default: 90% of the memory less the weights.", min=1
    )
    page_tokens: int = flag(16, "KV page size.", min=1)
    max_context_tokens: int = flag(32768, "Longer requests are cut to this.", min=2)
    max_batch_tokens: int = flag(8192, "Tokens of a step.", min=1)
    prefix_cache: bool = flag(True, "Share the KV of equal prefixes.")
    checkpoint_gb_s: float = flag(37.0, "KV copied to host memory and back; 0: not at all.", min=0)
    safepoint_layers: int = flag(4, "Layers between safepoints; 0: none.", min=0)
    overlap: bool = flag(False, "Plan one step ahead, as SGLang.")
    noise: float = flag(0.0, "Coefficient of variation of step times.", min=0)


@takes(SimulationFlags)
def simulate(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIRECTORY", help="Where the report goes.")
    ],
    flags: SimulationFlags,
    find_budget: Annotated[
        bool,
        typer.Option(
            "--find-budget",
            help="Find the largest --iteration-budget-ms with which --policy coserve or hygen"
            " meets every --slo; written to budget.json.",
        ),
    ] = False,
    event_log: Annotated[
        bool, typer.Option(help="Write events-POLICY.jsonl: some 50 MB for 1,000 s.")
    ] = False,
    time_limit: Annotated[
        float,
        typer.Option(metavar="S", help="Real seconds after which to report what there is."),
    ] = math.inf,
    quiet: Quiet = False,
) -> None:
    """Compare policies on a modelled machine. Every result is simulated.

    Ctrl-C and --time-limit end the run and report what was simulated so far.
    Exits with 0, with 1 when no budget meets the SLOs, with 2 when a flag or file cannot be
    used, with 130 after Ctrl-C.
    """
    from sglang_coserve.simulator.observer import RunControl
    from sglang_coserve.simulator.options import SimulationOptions, compare
    from sglang_coserve.simulator.report import table_text, write_report

    options = SimulationOptions(**vars(flags) | {"slo": tuple(flags.slo or ())})
    if find_budget:
        _find_budget(options, output, RunControl(time_limit, show=not quiet))
        return
    with RunControl(time_limit, show=not quiet) as control:
        results = compare(options, output, control, event_log=event_log)
    if results:
        write_report(results, output, options.to_dict())
        say(table_text(results), newline=False)
        say(f"report: {output / 'report.json'}")
    if control.is_interrupted:
        raise typer.Exit(code_of_signal(signal.SIGINT))


def _find_budget(options: SimulationOptions, directory: Path, control: RunControl) -> None:
    from sglang_coserve.simulator.find_budget import BudgetSearch

    search = BudgetSearch(options, control)
    directory.mkdir(parents=True, exist_ok=True)
    with control:
        search.run()
    report = directory / "budget.json"
    report.write_text(json.dumps(search.to_dict(), indent=2, allow_nan=False) + "\n", "utf-8")
    say(search.to_text(), newline=False)
    say(f"report: {report}")
    if control.is_interrupted:
        raise typer.Exit(code_of_signal(signal.SIGINT))
    if search.problem is not None:
        raise typer.Exit(ExitCode.SOME_FAILED)


class SeveralSlosCommand(TyperCommand):
    """A command whose ``--slo`` takes one or more values, as the server's does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the flag before each of its values, which typer can take."""
        return super().parse_args(ctx, list(_repeated("--slo", args)))


def _repeated(flag: str, args: Iterable[str]) -> Iterator[str]:
    is_open = False
    for arg in args:
        if arg.startswith("-"):
            is_open = arg == flag
            if is_open:
                continue
        elif is_open:
            yield flag
        yield arg
