"""``coserve profile``: measure this machine once, so that the scheduler can predict."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from sglang_coserve.cli.console import code_of_signal, say

__all__ = ["PROFILE_SETTINGS", "profile"]

PROFILE_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of the command that leave unknown flags to SGLang."""


def profile(
    context: typer.Context,
    model_path: Annotated[str, typer.Option(help="As for the server.")],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="PROFILE.json",
            help="Where the profile goes; its measurements go to PROFILE.samples.jsonl.",
        ),
    ],
    kind: Annotated[
        str,
        typer.Option(
            help="polynomial, linear, roofline, split_linear, or best: the one with the least error"
        ),
    ] = "best",
    plot: Annotated[
        Path | None, typer.Option(help="Draw measured against predicted (.png, .svg, .pdf).")
    ] = None,
    time_limit: Annotated[
        float, typer.Option(min=1, help="Measure for this long, s; starting SGLang is extra.")
    ] = 300.0,
    max_shapes: Annotated[int, typer.Option(min=1, help="Batches to measure.")] = 400,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from PROFILE.samples.jsonl.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the samples held out of the fits.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Measure batches on SGLang's model runner, fit latency models and report their errors.

    Takes SGLang's flags as well: give those that the server will have. Ctrl-C
    ends the measurement; what was measured is fitted and kept. Exits with 0, 2
    when a flag or file cannot be used, 3 when SGLang failed, 130 after Ctrl-C.
    """
    from sglang_coserve import profiler
    from sglang_coserve.errors import ConfigError

    if kind not in (profiler.BEST, *profiler.KINDS):
        known = ", ".join((profiler.BEST, *profiler.KINDS))
        raise ConfigError(f"--kind {kind}: use one of {known}")
    samples_path = output.with_suffix(".samples.jsonl")
    if samples_path.exists() and not resume:
        raise ConfigError(f"{samples_path}: measurements exist: add --resume, or remove the file")

    from sglang_coserve.profiler.progress import ProfileProgress
    from sglang_coserve.srt.executor_process import ExecutorProcesses

    flags = ["--model-path", model_path, "--log-level", "error", *context.args]
    with ExecutorProcesses(flags) as executor:
        machine = executor.machine
        shapes = profiler.plan_grid(executor.limits, max_shapes)
        with (
            profiler.SampleFile(samples_path, machine, resume=resume) as file,
            ProfileProgress(len(shapes), time_limit, show=not quiet) as progress,
        ):
            measuring = profiler.measure_grid(
                executor, shapes, time_limit_s=time_limit, done=tuple(file.measurements)
            )
            for measurement in measuring:
                file.append(measurement)
                progress.advance(measurement)
                if progress.is_interrupted:
                    break
    measurements = file.measurements
    attempts = profiler.fit_all([m.sample for m in measurements], machine, seed=seed)
    say(f"{machine.model} on {machine.hardware}, tp {machine.tp_size}")
    if measurements:
        say(profiler.report_text(measurements, attempts), newline=False)
    chosen = profiler.choose(attempts, kind)
    profiler.write_profile(profiler.to_profile(chosen, machine), output)
    say(f"profile: {output} ({chosen.model.kind}); measurements: {samples_path}")
    if plot is not None:
        profiler.write_plot(measurements, attempts, plot)
        say(f"plot: {plot}")
    if progress.is_interrupted:
        raise typer.Exit(code_of_signal(signal.SIGINT))
