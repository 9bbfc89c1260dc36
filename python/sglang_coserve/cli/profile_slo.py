"""``coserve profile slo``: the step budget that just meets the SLOs (HyGen §4.2)."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from sglang_coserve.cli import exit_codes
from sglang_coserve.cli.say import say
from sglang_coserve.interrupts import terminate_as_interrupt

__all__ = ["SLO_SETTINGS", "profile_slo"]

SLO_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of the command that leave unknown flags to SGLang."""


def profile_slo(
    context: typer.Context,
    profile: Annotated[
        Path, typer.Option(metavar="PROFILE.json", help="What coserve profile wrote.")
    ],
    slo: Annotated[
        list[str],
        typer.Option(
            metavar="SLO…",
            help="To be met, all at once: 'ttft p99 <= 300ms' 'tpot mean <= +50%', the latter"
            " over online requests alone. Of ttft, tpot and tbt; mean, p50, p90 and p99.",
        ),
    ],
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Online requests: a trace in Azure's, BurstGPT's or Mooncake's format."
            " Default: the bundled sample."
        ),
    ] = None,
    rate: Annotated[float, typer.Option(help="Factor of the online arrival rate.")] = 1.0,
    duration: Annotated[
        float | None,
        typer.Option(metavar="S", help="Seconds to simulate. Default: the whole trace."),
    ] = None,
    offline: Annotated[
        str,
        typer.Option(
            help="Offline requests: lengths such as 512x32 for as many as it takes, a JSONL batch"
            " file, or a trace."
        ),
    ] = "512x32",
    offline_concurrency: Annotated[
        int, typer.Option(min=1, help="Offline requests that the server has at any time.")
    ] = 64,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="As the server's --offline-policy.")
    ] = "coserve",
    kv_capacity_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV slots of the engine.")
    ] = None,
    page_tokens: Annotated[int | None, typer.Option(min=1, help="KV page size.")] = None,
    max_running: Annotated[
        int | None, typer.Option(min=1, help="Requests that may hold KV.")
    ] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="As SGLang's --chunked-prefill-size.")
    ] = None,
    max_context_tokens: Annotated[
        int | None, typer.Option(min=2, help="Longer online requests are cut to this.")
    ] = None,
    max_runs: Annotated[int, typer.Option(min=2, help="Most runs to simulate.")] = 16,
    seed: Annotated[int, typer.Option(help="Same seed, same search.")] = 0,
    validate: Annotated[
        bool, typer.Option("--validate", help="Then run the real server with the budget.")
    ] = False,
    model_path: Annotated[
        str | None, typer.Option(help="With --validate: the model; SGLang's flags may follow.")
    ] = None,
    validate_seconds: Annotated[
        float, typer.Option(min=1, metavar="S", help="Length of a real run.")
    ] = 60.0,
    validate_runs: Annotated[
        int, typer.Option(min=1, help="Real runs, with smaller budgets while an SLO is missed.")
    ] = 4,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="BUDGET.json", help="Where everything goes."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Find the step budget that just meets the SLOs: simulated, then measured.

    Simulates the server's scheduler with steps as long as the profile says.
    With --validate it then starts the server, measures the same load, and lowers
    the budget until the SLOs are met there; the limits of the engine are read
    from that server, where no flag gives them. Takes SGLang's flags as well.
    Exits with 0, 1 when no budget meets the SLOs, 2 when a flag or file cannot be
    used, 3 when the server failed, 130 after Ctrl-C.
    """
    from sglang_coserve import slo_search
    from sglang_coserve.errors import ConfigError

    flags = tuple(context.args)
    validation = None
    if validate:
        if model_path is None:
            raise ConfigError("--validate runs the server: give its --model-path")
        validation = slo_search.ValidationOptions(
            model_path, flags, validate_seconds, validate_runs
        )
    elif flags or model_path is not None:
        unused = flags[0] if flags else "--model-path"
        raise ConfigError(f"{unused}: for the server, which only --validate runs")
    options = slo_search.SearchOptions(
        profile=profile,
        slo=tuple(slo),
        trace=trace,
        rate=rate,
        duration=duration,
        offline=offline,
        offline_concurrency=offline_concurrency,
        policy=policy,
        kv_capacity_tokens=kv_capacity_tokens,
        page_tokens=page_tokens,
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        max_context_tokens=max_context_tokens,
        max_runs=max_runs,
        seed=seed,
        validation=validation,
    )
    is_interrupted = False
    with (
        TemporaryDirectory(prefix="coserve-slo-") as work,
        slo_search.SearchProgress(show=not quiet) as progress,
    ):
        session = slo_search.SearchSession(options, Path(work), progress)
        try:
            with terminate_as_interrupt():
                session.run()
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            # Also what was simulated before a server failed.
            say(slo_search.report_text(session), newline=False)
            if output is not None:
                report = slo_search.report_to_dict(session)
                output.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", "utf-8")
                say(f"written: {output}")
    if is_interrupted:
        raise typer.Exit(exit_codes.of_signal(signal.SIGINT))
    if session.problem is not None:
        raise typer.Exit(exit_codes.SOME_FAILED)
