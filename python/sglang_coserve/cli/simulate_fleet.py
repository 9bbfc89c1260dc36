"""``coserve simulate fleet``: engines, a router and a gateway on modelled machines."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Annotated

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

__all__ = ["simulate_fleet"]


def simulate_fleet(
    engines: Annotated[
        str, typer.Option(metavar="N,…", help="Sizes of the fleets to compare with one engine.")
    ] = "2,4,8",
    trace: Annotated[
        Path | None,
        typer.Option(help="Online requests of each engine. Default: the bundled sample."),
    ] = None,
    offline: Annotated[
        str,
        typer.Option(
            help="Lines: lengths such as 4096x256 for an endless batch, or a JSONL batch file that"
            " the largest fleet does not end."
        ),
    ] = "2048x256",
    router: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Of online requests: round_robin, random, power_of_two, least_load.",
        ),
    ] = "round_robin",
    by_prefix: Annotated[
        bool, typer.Option(help="Place lines by their prefixes, as the gateway does.")
    ] = True,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENGINE@S+S",
            help="An engine, from 0, dies at a time, and is back so many seconds later; repeat it.",
        ),
    ] = None,
    drain: Annotated[
        list[str] | None,
        typer.Option(metavar="ENGINE@S+S", help="The same; its online requests end there."),
    ] = None,
    pools: Annotated[
        bool,
        typer.Option(
            "--pools",
            help="Half of the engines are relaxed, where lines begin, half strict, with the online"
            " requests and the running lines that suit them.",
        ),
    ] = False,
    hardware: Hardware = "h100",
    model: Model = "llama-3.1-8b",
    tp_size: Annotated[int, typer.Option(min=1, help="Devices of an engine.")] = 1,
    policy: Annotated[str, typer.Option(metavar="NAME", help="Of every engine.")] = "coserve",
    slo_ttft_ms: SloTtftMs = None,
    slo_tpot_ms: SloTpotMs = None,
    rate: Rate = 1.0,
    duration: Annotated[float, typer.Option(metavar="S", help="Simulated seconds.")] = 60.0,
    max_running: Annotated[
        int, typer.Option(min=1, help="Requests that may hold KV in an engine.")
    ] = 256,
    seed: Annotated[int, typer.Option(help="Same seed, same result.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="All figures as JSON.")
    ] = None,
    time_limit: TimeLimit = math.inf,
    quiet: Quiet = False,
) -> None:
    """Compare fleets with as many engines alone. Every result is simulated.

    Ctrl-C and --time-limit end the run and report what was simulated so far.
    Exits with 0, with 2 when a flag or file cannot be used, with 130 after Ctrl-C.
    """
    from sglang_coserve.errors import ConfigError
    from sglang_coserve.simulator import RunControl, SimulationOptions
    from sglang_coserve.simulator.fleet_report import fleet_table_text
    from sglang_coserve.simulator.fleet_run import FleetOptions, simulate_fleets
    from sglang_coserve.simulator.outage import Outage
    from sglang_coserve.simulator.result import write_results

    try:
        sizes = tuple(map(int, engines.split(",")))
    except ValueError:
        raise ConfigError(f"--engines {engines}: use sizes such as 2,4,8") from None
    one = SimulationOptions(
        trace=trace,
        offline=offline,
        hardware=hardware,
        model=model,
        tp_size=tp_size,
        policy=policy,
        slo_ttft_ms=slo_ttft_ms,
        slo_tpot_ms=slo_tpot_ms,
        rate=rate,
        duration=duration,
        max_running=max_running,
        seed=seed,
    )
    outages = [Outage.parse(text, is_death=True) for text in kill or ()]
    outages += [Outage.parse(text, is_death=False) for text in drain or ()]
    options = FleetOptions(one, sizes, router, by_prefix, tuple(outages), pools)
    with RunControl(time_limit, show=not quiet) as control:
        results = simulate_fleets(options, control)
    say(fleet_table_text(results), newline=False)
    if output is not None:
        settings = {
            **one.to_dict(),
            "engines": sizes,
            "router": router,
            "by_prefix": by_prefix,
            "kill": kill or [],
            "drain": drain or [],
            "pools": pools,
        }
        write_results(results, output, settings)
    if control.is_interrupted:
        raise typer.Exit(exit_codes.of_signal(signal.SIGINT))
