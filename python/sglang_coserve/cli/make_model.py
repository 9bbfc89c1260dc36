"""``coserve make-model``: a small random-weight model, or an emulated one, to try things out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from sglang_coserve.cli.console import say, takes
from sglang_coserve.terminal import flag

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
    hardware: str = flag("h100", "a100, h100, h200, b200 or ascend-910c.", group=_EMULATED)
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
        context = flags.context or _CONTEXT_TOKENS
        spec = SmallModelSpec(vocab=flags.vocab, context=context, seed=flags.seed)
        say(f"written: {make_small_model(directory, spec)}")
        return
    from sglang_coserve.profiler.fits import load_profile
    from sglang_coserve.srt.emulation.model_directory import (
        CONTEXT_TOKENS,
        make_emulated_model,
        stock_command,
    )
    from sglang_coserve.srt.emulation.settings import Emulation, SlowSpells

    emulation = Emulation.of(
        flags.emulate,
        flags.hardware,
        tp_size=flags.tp,
        latency=load_profile(flags.profile) if flags.profile else None,
        noise=flags.noise,
        model_error=flags.model_error,
        slow_spells=None if flags.slow_spells is None else SlowSpells.parse(flags.slow_spells),
        seed=flags.seed,
    )
    context = flags.context or CONTEXT_TOKENS
    made = make_emulated_model(directory, emulation, vocab=flags.vocab, context=context)
    say(f"written: {made}, which is {emulation.name}: no GPU, figures are emulated")
    say(f"to serve it: python -m sglang_coserve.launch_server --model-path {made}")
    say(f"stock SGLang: {stock_command(made)}")
