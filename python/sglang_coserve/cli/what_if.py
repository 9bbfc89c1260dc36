"""``coserve what-if``: recorded traffic under other settings."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Annotated

import typer

from sglang_coserve.cli import exit_codes
from sglang_coserve.cli.say import say
from sglang_coserve.cli.simulation_flags import Quiet

__all__ = ["what_if"]


def what_if(
    recording: Annotated[
        Path, typer.Argument(metavar="PLANS.jsonl", help="What a server's --record-plans wrote.")
    ],
    policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Another policy than the server's.")
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(metavar="SLO…", help="Other SLOs than the server's: 'ttft p99 <= 300ms'."),
    ] = None,
    offline: Annotated[
        str | None,
        typer.Option(metavar="±PERCENT", help="More offline requests, such as +20%, or fewer."),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Simulations of each, which differ in what steps take by chance; 5 unless told.",
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(metavar="S", help="Real seconds after which to give up.")
    ] = math.inf,
    quiet: Quiet = False,
) -> None:
    """Simulate recorded traffic as it was, and with something changed.

    The first row is what was measured, so that the error of simulating is seen; without a change it
    is the only result. Exits with 0, with 2 when a file or flag cannot be used, with 130 after
    Ctrl-C.
    """
    from sglang_coserve.core.control.slo import parse_slo
    from sglang_coserve.errors import ConfigError, InputFileError
    from sglang_coserve.simulator import RunControl
    from sglang_coserve.simulator.recorded_traffic import read_traffic
    from sglang_coserve.simulator.what_if import RUNS, Change, compare_change, parse_share

    change = Change(
        policy=policy,
        slos=tuple(map(parse_slo, slo or ())),
        more_offline=parse_share(offline) if offline else 0.0,
    )
    try:
        with recording.open(encoding="utf-8", errors="replace") as lines:
            traffic = read_traffic(lines, str(recording))
    except OSError as error:
        raise InputFileError(f"{recording}: cannot be read: {error.strerror}") from error
    begun = ""
    with RunControl(time_limit, show=not quiet) as control:

        def on_progress(name: str, simulated_s: float) -> bool:
            nonlocal begun
            if name != begun:
                begun = name
                control.begin(name, traffic.interval_s)
            return control.tick(simulated_s)

        found = compare_change(traffic, change, on_progress, runs=RUNS if runs is None else runs)
    if control.is_interrupted:
        raise typer.Exit(exit_codes.of_signal(signal.SIGINT))
    if found is None:
        raise ConfigError(f"--time-limit {time_limit:g}: it was over before the simulation")
    say(found.table())
    say(found.sentence())
