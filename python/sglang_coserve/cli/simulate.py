"""``coserve simulate``: the scheduler on a modelled machine, before buying the real one."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_coserve.cli import exit_codes
from sglang_coserve.cli.say import say
from sglang_coserve.cli.simulation_flags import (
    Hardware,
    Model,
    Quiet,
    Rate,
    SloTpotMs,
    SloTtftMs,
    TimeLimit,
)

if TYPE_CHECKING:
    from sglang_coserve.simulator import RunControl, SimulationOptions

__all__ = ["simulate"]


def simulate(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIRECTORY", help="Where the report goes.")
    ],
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Online requests: a trace in Azure's, BurstGPT's or Mooncake's format."
            " Default: the bundled sample."
        ),
    ] = None,
    offline: Annotated[
        str | None,
        typer.Option(
            help="Offline requests: a JSONL batch file, a trace, lengths such as 4096x256 for"
            " an endless backlog, or none. Default: the bundled sample."
        ),
    ] = None,
    backlog: Annotated[
        int,
        typer.Option(
            min=0, help="Offline requests kept waiting; 0: they come at their trace's times."
        ),
    ] = 256,
    hardware: Hardware = "h100",
    model: Model = "llama-3.1-8b",
    tp_size: Annotated[int, typer.Option(min=1, help="Devices that share the model.")] = 1,
    policy: Annotated[
        str, typer.Option(metavar="NAME,…", help="Policies to compare on the same workload.")
    ] = "online_only,coserve",
    slo_ttft_ms: SloTtftMs = None,
    slo_tpot_ms: SloTpotMs = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SLO…",
            help="SLOs instead of targets, as of a server: 'ttft p99 <= 300ms', or relative to"
            " online requests alone: 'tbt p99 <= +10%'.",
        ),
    ] = None,
    rate: Rate = 1.0,
    duration: Annotated[
        float | None, typer.Option(metavar="S", help="Simulated seconds. Default: the whole trace.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Latency profile to plan with. Default: a roofline from the datasheet."),
    ] = None,
    true_profile: Annotated[
        Path | None,
        typer.Option(help="How long steps really take. Default: as planned."),
    ] = None,
    kv_capacity_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="KV slots. Default: 90% of the memory less the weights."),
    ] = None,
    page_tokens: Annotated[int, typer.Option(min=1, help="KV page size.")] = 16,
    max_context_tokens: Annotated[
        int, typer.Option(min=2, help="Longer requests are cut to this.")
    ] = 32768,
    max_running: Annotated[int, typer.Option(min=1, help="Requests that may hold KV.")] = 256,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 8192,
    prefix_cache: Annotated[bool, typer.Option(help="Share the KV of equal prefixes.")] = True,
    checkpoint_gb_s: Annotated[
        float, typer.Option(min=0, help="KV copied to host memory and back; 0: not at all.")
    ] = 37.0,
    safepoint_layers: Annotated[
        int, typer.Option(min=0, help="Layers between safepoints; 0: none.")
    ] = 4,
    overlap: Annotated[bool, typer.Option(help="Plan one step ahead, as SGLang.")] = False,
    noise: Annotated[
        float, typer.Option(min=0, help="Coefficient of variation of step times.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same event log.")] = 0,
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
    time_limit: TimeLimit = math.inf,
    quiet: Quiet = False,
) -> None:
    """Compare policies on a modelled machine. Every result is simulated.

    Ctrl-C and --time-limit end the run and report what was simulated so far.
    Exits with 0, with 1 when no budget meets the SLOs, with 2 when a flag or file cannot be
    used, with 130 after Ctrl-C.
    """
    from sglang_coserve.simulator import (
        RunControl,
        SimulationOptions,
        compare,
        table_text,
        write_report,
    )

    options = SimulationOptions(
        trace=trace,
        offline=offline,
        backlog=backlog,
        hardware=hardware,
        model=model,
        tp_size=tp_size,
        policy=policy,
        slo_ttft_ms=slo_ttft_ms,
        slo_tpot_ms=slo_tpot_ms,
        slo=tuple(slo or ()),
        rate=rate,
        duration=duration,
        profile=profile,
        true_profile=true_profile,
        kv_capacity_tokens=kv_capacity_tokens,
        page_tokens=page_tokens,
        max_context_tokens=max_context_tokens,
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        prefix_cache=prefix_cache,
        checkpoint_gb_s=checkpoint_gb_s,
        safepoint_layers=safepoint_layers,
        overlap=overlap,
        noise=noise,
        seed=seed,
    )
    if find_budget:
        _find_budget(options, output, RunControl(time_limit, show=not quiet))
        return
    with RunControl(time_limit, show=not quiet) as control:
        results = compare(options, output, control, event_log=event_log)
    if results:
        page = write_report(results, output, options.to_dict())
        say(table_text(results), newline=False)
        say(f"report: {page}")
    if control.is_interrupted:
        raise typer.Exit(exit_codes.of_signal(signal.SIGINT))


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
        raise typer.Exit(exit_codes.of_signal(signal.SIGINT))
    if search.problem is not None:
        raise typer.Exit(exit_codes.SOME_FAILED)
