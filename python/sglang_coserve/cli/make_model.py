"""``coserve make-model``: a small random-weight model, for trying things out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_coserve.cli.say import say

__all__ = ["make_model"]


def make_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the model goes.")],
    architecture: Annotated[str, typer.Option(help="llama, qwen2 or qwen3.")] = "llama",
    hidden: Annotated[int, typer.Option(help="Width.")] = 256,
    layers: Annotated[int, typer.Option(help="Depth.")] = 4,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Heads of keys and values.")] = 2,
    vocab: Annotated[int, typer.Option(help="Most tokens in the vocabulary.")] = 2048,
    context: Annotated[int, typer.Option(help="Longest prompt plus output, tokens.")] = 4096,
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
) -> None:
    """Write a small random-weight model with tokenizer and chat template. Downloads nothing."""
    from sglang_coserve.small_model import SmallModelSpec, make_small_model

    spec = SmallModelSpec(architecture, hidden, layers, heads, kv_heads, vocab, context, seed)
    say(f"written: {make_small_model(directory, spec)}")
