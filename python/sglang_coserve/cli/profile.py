"""Models to try things out, and how long their steps take: ``coserve make-model``, ``profile``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sglang_coserve.cli.console import say, takes
from sglang_coserve.terminal import INTERRUPTED, StoppableBar, flag

if TYPE_CHECKING:
    from sglang_coserve.profiler.latency import ShapeTiming


_CONTEXT_TOKENS: Final = 4096
_EMULATED: Final = "Emulated"


@dataclass(frozen=True)
class ModelFlags:
    """What ``make-model`` is told."""

    vocab: int = flag(2048, "Most tokens in the vocabulary.")
    context: int | None = flag(
        None, "Longest prompt plus output, tokens; 4096, or 32768 if emulated."
    )
    seed: int = flag(0, "Of the weights, and of what varies.")
    emulate: str | None = flag(
        None,
        "Take the time of this model on a GPU, and compute nothing: llama-3.1-8b, for one.",
        metavar="MODEL",
        group=_EMULATED,
    )
    hardware: str = flag("h100", "a40, a100, h100, h200, b200 or ascend-910c.", group=_EMULATED)
    tp: int = flag(1, "GPUs that compute together.", group=_EMULATED)
    profile: Path | None = flag(
        None,
        "A latency profile by which steps take time; default: the datasheet's.",
        metavar="JSON",
        group=_EMULATED,
    )
    noise: float = flag(0.03, "Coefficient of variation of a step's time.", group=_EMULATED)
    model_error: float = flag(
        0.0,
        "The same of a factor that all batches of about the same sizes share.",
        group=_EMULATED,
    )
    slow_spells: str | None = flag(
        None,
        "Times at which steps take longer, such as 60:2:3.",
        metavar="EVERY_S:LAST_S:FACTOR",
        group=_EMULATED,
    )
    prefill_launch_ms: float = flag(
        0.0,
        "Time of the host to launch prefills, once the step before has ended, as with FlashInfer.",
        group=_EMULATED,
    )


@takes(ModelFlags)
def make_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the model goes.")],
    flags: ModelFlags,
) -> None:
    """Write a small random-weight model with tokenizer and chat template. Downloads nothing.

    With --emulate, a model that takes the time of a large one on a GPU: see docs/emulation.md.
    """
    from sglang_coserve.small_model import SmallModelSpec, make_small_model

    if flags.emulate is None:
        context = _CONTEXT_TOKENS if flags.context is None else flags.context
        spec = SmallModelSpec(vocab=flags.vocab, context=context, seed=flags.seed)
        say(f"written: {make_small_model(directory, spec)}")
        return
    from sglang_coserve.profiler.fits import load_profile
    from sglang_coserve.srt.optional_parts import EMULATED

    platform = EMULATED.imitating(
        flags.emulate,
        flags.hardware,
        tp_size=flags.tp,
        latency=load_profile(flags.profile) if flags.profile else None,
        slow_spells=flags.slow_spells,
        noise=flags.noise,
        model_error=flags.model_error,
        prefill_launch_s=1e-3 * flags.prefill_launch_ms,
        seed=flags.seed,
    )
    command = platform.make_model(directory, vocab=flags.vocab, context=flags.context)
    say(f"written: {directory}, which is {platform.emulated}: no GPU, figures are emulated")
    say(f"to serve it: python -m sglang_coserve.launch_server --model-path {directory}")
    say(f"stock SGLang: {command}")


PROFILE_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of the command that leave unknown flags to SGLang."""


@dataclass(frozen=True)
class ProfileFlags:
    """What ``profile`` is told."""

    kind: str = flag(
        "best",
        "polynomial, roofline, or best: the one with the least error",
    )
    time_limit: float = flag(300.0, "Measure for this long, s; starting SGLang is extra.", min=1)
    max_shapes: int = flag(400, "Batches to measure.", min=1)
    seed: int = flag(0, "Of the samples held out of the fits.")
    quiet: bool = flag(False, "No progress bar.", "--quiet", "-q")


@takes(ProfileFlags)
def profile(
    context: typer.Context,
    model_path: Annotated[str, typer.Option(help="As for the server.")],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="PROFILE.json",
            help="Where the profile goes.",
        ),
    ],
    flags: ProfileFlags,
) -> None:
    """Measure batches on SGLang's model runner, fit latency models and report their errors.

    Takes SGLang's flags as well: give those that the server will have. Ctrl-C
    ends the measurement; what was measured is fitted and kept. Exits with 0, 2
    when a flag or file cannot be used, 3 when SGLang failed, 130 after Ctrl-C.
    """
    from sglang_coserve.errors import ConfigError
    from sglang_coserve.profiler.fits import BEST, KINDS, choose, fit_all, report_text, to_profile

    if flags.kind not in (BEST, *KINDS):
        known = ", ".join((BEST, *KINDS))
        raise ConfigError(f"--kind {flags.kind}: use one of {known}")

    if output.is_dir() or not output.parent.is_dir():
        raise ConfigError(f"--output {output}: name a file in a directory that exists")

    from sglang_coserve.profiler.fits import write_profile
    from sglang_coserve.profiler.latency import measure_grid
    from sglang_coserve.profiler.shapes import plan_grid
    from sglang_coserve.srt.executor_process import ExecutorProcesses

    sglang_flags = ["--model-path", model_path, "--log-level", "error", *context.args]
    with ExecutorProcesses(sglang_flags) as executor:
        machine = executor.machine
        shapes = plan_grid(executor.limits, flags.max_shapes)
        measurements = []
        with ProfileProgress(len(shapes), flags.time_limit, show=not flags.quiet) as progress:
            for measurement in measure_grid(executor, shapes, time_limit_s=flags.time_limit):
                measurements.append(measurement)
                progress.advance(measurement)
                if progress.is_interrupted:
                    break
    attempts = fit_all([m.sample for m in measurements], machine, seed=flags.seed)
    say(f"{machine.model} on {machine.hardware}, tp {machine.tp_size}")
    if measurements:
        say(report_text(measurements, attempts), newline=False)
    chosen = choose(attempts, flags.kind)
    write_profile(to_profile(chosen, machine), output)
    say(f"profile: {output} ({chosen.model.kind})")
    if progress.is_interrupted:
        raise typer.Exit(INTERRUPTED)


class ProfileProgress(StoppableBar):
    """A bar that shows the shapes done, or the time if that ends first."""

    def __init__(
        self,
        num_shapes: int,
        time_limit_s: float,
        *,
        show: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``show``: on standard error, a bar on a terminal and otherwise occasional lines."""
        super().__init__("profiling", total=1.0, show=show, clock=clock)
        self._num_shapes = num_shapes
        self._time_limit_s = time_limit_s
        self._start_s = clock()
        self._num_measured = 0

    def advance(self, measurement: ShapeTiming) -> None:
        """Show one more measurement."""
        self._num_measured += 1
        of_time = (self._clock() - self._start_s) / self._time_limit_s
        of_shapes = self._num_measured / max(1, self._num_shapes)
        done = min(1.0, max(of_time, of_shapes))
        batch = measurement.shape.stats
        text = (
            f"{self._num_measured} measured; P {batch.prefill_tokens} × "
            f"{batch.prefill_requests}, decodes {batch.decode_requests}: "
            f"{measurement.seconds * 1e3:,.1f} ms"
        )
        self._show(done, lambda: f"profiling: {done:.0%}, {text}", text=text)
