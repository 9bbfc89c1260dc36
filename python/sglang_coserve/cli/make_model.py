"""``coserve make-model``: a small random-weight model, or an emulated one, to try things out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from sglang_coserve.cli.say import say
from sglang_coserve.errors import ConfigError

__all__ = ["make_model"]

_CONTEXT_TOKENS: Final = 4096
_EMULATED: Final = "Emulated"


def make_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the model goes.")],
    architecture: Annotated[str, typer.Option(help="llama, qwen2 or qwen3.")] = "llama",
    hidden: Annotated[int, typer.Option(help="Width.")] = 256,
    layers: Annotated[int, typer.Option(help="Depth.")] = 4,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Heads of keys and values.")] = 2,
    vocab: Annotated[int, typer.Option(help="Most tokens in the vocabulary.")] = 2048,
    context: Annotated[
        int | None,
        typer.Option(help="Longest prompt plus output, tokens; 4096, or 32768 if emulated."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights, and of what varies.")] = 0,
    emulate: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Take the time of this model on a GPU, and compute nothing: llama-3.1-8b, …",
            rich_help_panel=_EMULATED,
        ),
    ] = None,
    hardware: Annotated[
        str,
        typer.Option(help="a100, h100, h200, b200 or ascend-910c.", rich_help_panel=_EMULATED),
    ] = "h100",
    tp: Annotated[
        int, typer.Option(help="GPUs that compute together.", rich_help_panel=_EMULATED)
    ] = 1,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="JSON",
            help="A latency profile by which steps take time; default: the datasheet's.",
            rich_help_panel=_EMULATED,
        ),
    ] = None,
    noise: Annotated[
        float,
        typer.Option(help="Coefficient of variation of a step's time.", rich_help_panel=_EMULATED),
    ] = 0.03,
    model_error: Annotated[
        float,
        typer.Option(
            help="The same of a factor that all batches of about the same sizes share.",
            rich_help_panel=_EMULATED,
        ),
    ] = 0.0,
    slow_spells: Annotated[
        str | None,
        typer.Option(
            metavar="EVERY_S:LAST_S:FACTOR",
            help="Times at which steps take longer, such as 60:2:3.",
            rich_help_panel=_EMULATED,
        ),
    ] = None,
) -> None:
    """Write a small random-weight model with tokenizer and chat template. Downloads nothing.

    With --emulate, a model that takes the time of a large one on a GPU: see docs/emulation.md.
    """
    from sglang_coserve.small_model import SmallModelSpec, make_small_model

    spec = SmallModelSpec(architecture, hidden, layers, heads, kv_heads)
    if emulate is None:
        spec = replace(spec, vocab=vocab, context=context or _CONTEXT_TOKENS, seed=seed)
        say(f"written: {make_small_model(directory, spec)}")
        return
    if spec != SmallModelSpec():
        raise ConfigError(
            "--emulate brings the shape of its model: remove --architecture, --hidden, --layers, "
            "--heads and --kv-heads"
        )
    from sglang_coserve.profiler.profile_file import load_profile
    from sglang_coserve.srt.emulation.model_directory import (
        CONTEXT_TOKENS,
        make_emulated_model,
        stock_command,
    )
    from sglang_coserve.srt.emulation.settings import Emulation, SlowSpells

    emulation = Emulation.of(
        emulate,
        hardware,
        tp_size=tp,
        latency=None if profile is None else load_profile(profile),
        noise=noise,
        model_error=model_error,
        slow_spells=None if slow_spells is None else SlowSpells.parse(slow_spells),
        seed=seed,
    )
    context = context or CONTEXT_TOKENS
    made = make_emulated_model(directory, emulation, vocab=vocab, context=context)
    say(f"written: {made}, which is {emulation.name}: no GPU, figures are emulated")
    say(f"to serve it: python -m sglang_coserve.launch_server --model-path {made}")
    say(f"stock SGLang: {stock_command(made)}")
