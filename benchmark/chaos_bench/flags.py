"""The flags that all programs that hurt servers have."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

__all__ = ["add_batch_flags", "add_round_flags", "chaos_parser"]


def chaos_parser(
    description: str, out: str, pause_s: tuple[float, float]
) -> argparse.ArgumentParser:
    """Return a parser; ``pause_s`` are the bounds of the time between two injuries."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path(out), help="where everything goes")
    add("--seed", type=int, default=1)
    add("--model-path", help="default: a random model of 4 layers, hidden size 256, fp32")
    add("--server-flag", action="append", default=[], metavar="FLAG", help="one word of a flag")
    add("--ready-timeout", type=float, default=300.0, metavar="S")
    add("--known", type=int, default=60, help="different prompts")
    add("--pause", type=float, nargs=2, default=pause_s, metavar=("LOW", "HIGH"))
    return parser


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``BatchLoad``."""
    add = parser.add_argument
    add("--lines", type=int, default=120, help="of a batch")
    add("--unfinished", type=int, default=4, help="batches at a time")
    add("--keys", type=int, default=3)
    add("--drain-timeout", type=float, default=900.0, metavar="S", help="for the last batches")


def add_round_flags(parser: argparse.ArgumentParser, injuries: Iterable[str]) -> None:
    """Add the flags of ``hurt_in_rounds``; ``injuries`` are the names that there are."""
    names = list(injuries)
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="each injury is done once, however few")
    add("--injuries", nargs="*", choices=names, default=names, help="only these")
