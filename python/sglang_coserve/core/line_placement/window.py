"""How many lines one engine is to have at a time."""

from __future__ import annotations

from typing import Final

__all__ = ["LINES_AHEAD", "line_window"]

LINES_AHEAD: Final = 16
"""Lines that wait in an engine beyond those that run there. Enough for it to choose by shared
prefix, and never to be without a next one between two looks at its load; few enough that
another engine, which is free earlier, can have the rest. Measured: more gained nothing."""


def line_window(in_flight: int, waiting: int) -> int:
    """Return how many lines an engine is to have: those that run, and ``LINES_AHEAD``.

    Args:
        in_flight: Lines that it had from us when it was asked.
        waiting: Offline requests that waited in it then, others' too: an engine that has much
            to do for others gets less of us, and at least one line, so that every job goes on.
    """
    return max(1, in_flight - waiting + LINES_AHEAD)
