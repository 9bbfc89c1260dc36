"""What is left out of every model: learned from first tokens that came late."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

from sglang_coserve.core.batch_stats import BatchStats

__all__ = ["LATE_SHARE", "LateFirstTokens", "Wait"]

LATE_SHARE: Final = 0.01
"""Of the requests, as a target for the 99th percentile allows."""

_STEP_DOWN: Final = 0.03
_STEP_UP: Final = _STEP_DOWN * LATE_SHARE / (1 - LATE_SHARE)
"""One late request in a hundred leaves the factor where it is. Ten times larger steps stopped
offline work for good on a machine with slow spells, and first tokens were no earlier for it."""

_LEAST: Final = math.log(1 / 8)

_COMMITS: Final = 3
"""A measurement comes before so many iterations later, or not at all: an engine that overlaps
iterations is one behind, and of those that were aborted there is none."""


class Wait(NamedTuple):
    """A request that waits for its first token."""

    arrival_s: float
    """When it came."""

    added_s: float
    """What offline work has added to its wait, the iteration that ends it included."""


@dataclass(frozen=True, slots=True)
class _Iteration:
    """One that gives requests their first token."""

    number: int
    batch: BatchStats
    start_s: float
    predicted_s: float
    waits: tuple[Wait, ...]
    limit_s: float


class LateFirstTokens:
    """A factor for the time that offline work may take: less after each first token it made late.

    It rises slowly while they are in time, so that in the long run one in a hundred is
    late because of it (a stochastic approximation of the quantile, after Robbins and
    Monro). Neither queues nor a machine that slows down for a second need to be modelled
    for that. A first token that would have been late without offline work says nothing:
    to count it stops offline work for good where online requests alone miss the target
    once in a hundred, and helps none of them.
    """

    def __init__(self) -> None:
        self._log_factor = 0.0
        self._number = 0
        self._iterations: deque[_Iteration] = deque()

    @property
    def factor(self) -> float:
        """From 1/8 to 1."""
        return math.exp(self._log_factor)

    def expect(
        self,
        batch: BatchStats,
        start_s: float,
        predicted_s: float,
        waits: tuple[Wait, ...],
        limit_s: float,
    ) -> None:
        """Note an iteration that begins. Amortized O(requests).

        Args:
            batch: What it computes.
            start_s: When it begins.
            predicted_s: How long it is to last; counts unless ``measured`` says better.
            waits: The online requests that it gives their first token.
            limit_s: The TTFT from which on a request is late.
        """
        self._number += 1
        while self._iterations and self._number - self._iterations[0].number >= _COMMITS:
            self._judge(oldest := self._iterations.popleft(), oldest.predicted_s)
        if waits:
            self._iterations.append(
                _Iteration(self._number, batch, start_s, predicted_s, waits, limit_s)
            )

    def measured(self, batch: BatchStats, seconds: float) -> None:
        """Note how long an iteration with ``batch`` took, one of the last few. O(1)."""
        for index, iteration in enumerate(self._iterations):
            if iteration.batch == batch:
                del self._iterations[index]
                self._judge(iteration, seconds)
                return

    def _judge(self, iteration: _Iteration, seconds: float) -> None:
        end_s = iteration.start_s + seconds
        for wait in iteration.waits:
            ttft_s = end_s - wait.arrival_s
            if ttft_s <= iteration.limit_s:
                step = _STEP_UP
            elif ttft_s - wait.added_s <= iteration.limit_s:
                step = -_STEP_DOWN
            else:
                continue
            self._log_factor = min(max(self._log_factor + step, _LEAST), 0.0)
