"""How many lines one engine is to have at a time, and when none.

An engine that answers and fails is always free, so it would get, and fail, every line.
"""

from __future__ import annotations

from typing import Final

__all__ = ["FAILURES_IN_A_ROW", "LINES_AHEAD", "FailureStreak", "line_window"]

LINES_AHEAD: Final = 16
"""Lines that wait in an engine beyond those that run there. Enough for it to choose by shared
prefix, and never to be without a next one between two looks at its load; few enough that
another engine, which is free earlier, can have the rest. It kept engines busy in every run of
``benchmark/fleet_chaos.py``; other numbers were not compared."""


FAILURES_IN_A_ROW: Final = 3
"""Lines that fail on any engine are rare, and others succeed in between; an engine that is broken
fails them all. Fewer than the attempts of a line, so that it outlives the engine."""

_FIRST_REST_S: Final = 5.0
"""Longer than a server takes to end that has noticed that its engine died."""

_MOST_REST_S: Final = 300.0


class FailureStreak:
    """When one engine is to be left alone. Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._rest_s = _FIRST_REST_S
        self._rests_until_s = 0.0

    def succeeded(self) -> None:
        """Note that the engine served a line, or that a line was at fault."""
        self._num_failures = 0
        self._rest_s = _FIRST_REST_S

    def failed(self, now_s: float) -> None:
        """Note that the engine failed on a line; after some of them in a row it rests.

        Each rest is twice as long as the one before, up to five minutes, and ends with as many
        lines more.
        """
        self._num_failures += 1
        if self._num_failures >= FAILURES_IN_A_ROW and not self.is_resting(now_s):
            self._num_failures = 0
            self._rests_until_s = now_s + self._rest_s
            self._rest_s = min(_MOST_REST_S, 2 * self._rest_s)

    def is_resting(self, now_s: float) -> bool:
        """Tell whether the engine is to get nothing."""
        return now_s < self._rests_until_s


def line_window(in_flight: int, waiting: int) -> int:
    """Return how many lines an engine is to have: those that run, and ``LINES_AHEAD``.

    Args:
        in_flight: Lines that it had from us when it was asked.
        waiting: Offline requests that waited in it then, others' too: an engine that has much
            to do for others gets less of us, and at least one line, so that every job goes on.
    """
    return max(1, in_flight - waiting + LINES_AHEAD)
