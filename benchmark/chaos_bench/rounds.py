"""When something is hurt, by what, and the flags that say so."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Final

from sglang_coserve.terminal import StoppableBar

_POLL_S: Final = 0.2


def chaos_parser(
    description: str, out: str, pause_s: tuple[float, float], injuries: Iterable[str]
) -> argparse.ArgumentParser:
    """Return a parser with the flags that all programs have that hurt servers.

    Args:
        description: Of the program; its first line is shown.
        out: Where everything goes, by default.
        pause_s: The bounds of the time between two injuries, by default.
        injuries: The names that there are.
    """
    names = list(injuries)
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path(out), help="where everything goes")
    add("--seed", type=int, default=1)
    add("--model-path", help="default: a random model of 4 layers, hidden size 256, fp32")
    add("--server-flag", action="append", default=[], metavar="FLAG", help="one word of a flag")
    add("--known", type=int, default=60, help="different prompts")
    add("--lines", type=int, default=120, help="of a batch")
    add("--unfinished", type=int, default=4, help="batches at a time")
    add("--minutes", type=float, default=60.0, help="each injury is done once, however few")
    add("--pause", type=float, nargs=2, default=pause_s, metavar=("LOW", "HIGH"))
    add("--injuries", nargs="*", choices=names, default=names, help="only these")
    return parser


def hurt_in_rounds(
    injure: Callable[[str], bool],
    names: Sequence[str],
    options: argparse.Namespace,
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Injure in rounds, each with every name once, in an order of its own.

    The first round is whole; after it all ends with ``options.minutes``. Ctrl-C ends it after the
    injury under way, so that nothing stays frozen or full; a second one interrupts.

    Args:
        injure: Does what a name stands for; False if that cannot be done now, and it is asked for
            again.
        names: Of the injuries.
        options: Those of ``chaos_parser``.
        meanwhile: Called again and again between injuries.
    """
    rng = random.Random(options.seed)
    end_s = time.monotonic() + options.minutes * 60
    rounds = chain.from_iterable(rng.sample(names, len(names)) for _ in count())
    with StoppableBar(show=False) as stop:
        for number, name in enumerate(rounds):
            is_done = False
            while not is_done:
                wake_s = time.monotonic() + rng.uniform(*options.pause)
                while time.monotonic() < wake_s and not stop.is_interrupted:
                    time.sleep(_POLL_S)
                    meanwhile()
                left_s = end_s - time.monotonic()
                if stop.is_interrupted or (number >= len(names) and left_s <= 0):
                    print("no more injuries; waiting for the batches to end", file=sys.stderr)
                    return
                print(f"{max(0.0, left_s):.0f} s left: {name}", file=sys.stderr)
                is_done = injure(name)
