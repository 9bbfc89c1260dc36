"""When an engine that answers, and fails on every line, is left alone."""

from __future__ import annotations

from typing import Final

FAILURES_IN_A_ROW: Final = 3
"""Lines that fail on any engine are rare, and others succeed in between. A broken engine fails all
lines, and is always free for the next one. Fewer than the attempts of a line, so that the line
outlives the engine."""

_FIRST_REST_S: Final = 5.0
"""Longer than a server takes to end that has noticed that its engine died."""

_MOST_REST_S: Final = 300.0


class FailureStreak:
    """Failures of one engine in a row. Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._rest_s = _FIRST_REST_S
        self._rests_until_s = 0.0

    def succeeded(self) -> None:
        """Note that the engine served a line, or that a line was at fault."""
        self._num_failures = 0
        self._rest_s = _FIRST_REST_S

    def failed(self, now_s: float) -> None:
        """Note that the engine failed on a line. After ``FAILURES_IN_A_ROW`` it rests.

        Each rest is twice as long as the rest before, up to five minutes. Another rest needs as
        many failures again.
        """
        self._num_failures += 1
        if self._num_failures >= FAILURES_IN_A_ROW and not self.is_resting(now_s):
            self._num_failures = 0
            self._rests_until_s = now_s + self._rest_s
            self._rest_s = min(_MOST_REST_S, 2 * self._rest_s)

    def rest(self, now_s: float) -> None:
        """Have the engine rest at once, whatever came before."""
        self._num_failures = FAILURES_IN_A_ROW - 1
        self.failed(now_s)

    def is_resting(self, now_s: float) -> bool:
        """Return whether the engine is to get no lines."""
        return now_s < self._rests_until_s
