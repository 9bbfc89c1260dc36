"""Tokens per second while there is work."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["TokenRate"]

_LEARNING_S: Final = 10.0
_TOGETHER_S: Final = 0.1
"""Tokens that come within it are remembered as one number, so that memory does not grow with the
rate: 2,000 lines a second took some 40 MiB."""


class TokenRate:
    """A moving mean over the last ``window_s``, to 0.1 s, in which anything was in flight.

    Time without work does not count, so the rate after a pause is that before it.
    ``clock`` is monotonic, in seconds. ``expected_per_s`` stands in for what is
    missing of the first ten seconds with work: a prompt counts only when its line ends.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        window_s: float = 60.0,
        expected_per_s: float | None = None,
    ) -> None:
        self._clock = clock
        self._window_s = window_s
        self._expected_per_s = expected_per_s
        self._in_flight = 0
        self._last_s = clock()
        self._busy_s = 0.0
        self._recent: deque[tuple[float, int]] = deque()
        self._tokens = 0
        self.total_tokens = 0
        """Since the start."""

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count the time within it as time with work."""
        self._advance()
        self._in_flight += 1
        try:
            yield
        finally:
            self._advance()
            self._in_flight -= 1

    @property
    def num_in_flight(self) -> int:
        """How many are within ``in_flight``."""
        return self._in_flight

    def add(self, tokens: int) -> None:
        """Count tokens that work in flight took. O(1) amortised."""
        self._advance()
        since_s, together = self._recent[-1] if self._recent else (-math.inf, 0)
        if self._busy_s - since_s < _TOGETHER_S:
            self._recent[-1] = (since_s, together + tokens)
        else:
            self._recent.append((self._busy_s, tokens))
        self._tokens += tokens
        self.total_tokens += tokens

    def per_s(self) -> float | None:
        """Return the mean; before the first tokens what is expected, None if nothing is."""
        self._advance()
        observed_s = min(self._busy_s, self._window_s)
        if self._expected_per_s is None:
            return self._tokens / observed_s if self._tokens and observed_s else None
        # Work that gets nothing, because online requests take all, lowers it further and further.
        missing_s = max(_LEARNING_S - observed_s, 0.0 if self._tokens else 1.0)
        return (self._tokens + self._expected_per_s * missing_s) / (observed_s + missing_s)

    def _advance(self) -> None:
        now_s = self._clock()
        if self._in_flight:
            self._busy_s += now_s - self._last_s
        self._last_s = now_s
        while self._recent and self._recent[0][0] <= self._busy_s - self._window_s:
            self._tokens -= self._recent.popleft()[1]
