"""When something is hurt, and by what."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain, count
from typing import Final

from sglang_coserve.interrupts import StopOnInterrupt

__all__ = ["hurt_in_rounds"]

_POLL_S: Final = 0.2


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
        options: Those of ``chaos_parser`` and ``add_round_flags``.
        meanwhile: Called again and again between injuries.
    """
    rng = random.Random(options.seed)
    end_s = time.monotonic() + options.minutes * 60
    rounds = chain.from_iterable(rng.sample(names, len(names)) for _ in count())
    with StopOnInterrupt() as stop:
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
