"""What is left out of every model: learned from first tokens that came late."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from sglang_coserve.core.batch_stats import BatchStats

__all__ = ["LateFirstTokens"]

_LATE_SHARE: Final = 0.01
"""Of the requests, as a target for the 99th percentile allows."""

_STEP_DOWN: Final = 0.3
_STEP_UP: Final = _STEP_DOWN * _LATE_SHARE / (1 - _LATE_SHARE)
"""One late request in a hundred leaves the factor where it is."""

_LEAST: Final = math.log(1 / 8)

_COMMITS: Final = 3
"""A measurement comes before so many iterations later, or not at all: an engine that overlaps
iterations is one behind, and of those that were aborted there is none."""


@dataclass(frozen=True, slots=True)
class _Iteration:
    """One that gives requests their first token."""

    number: int
    batch: BatchStats
    start_s: float
    predicted_s: float
    arrivals_s: tuple[float, ...]
    limit_s: float


class LateFirstTokens:
    """A factor for the time that offline work may take: less after each first token that is late.

    It rises slowly while they are in time, so that in the long run one in a hundred is
    late: the 99th percentile is then at its limit (a stochastic approximation of the
    quantile, after Robbins and Monro). Neither queues nor a machine that slows down
    for a second need to be modelled for that.
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
        arrivals_s: tuple[float, ...],
        limit_s: float,
    ) -> None:
        """Note an iteration that begins. Amortized O(requests).

        Args:
            batch: What it computes.
            start_s: When it begins.
            predicted_s: How long it is to last; counts unless ``measured`` says better.
            arrivals_s: Of the online requests that it gives their first token.
            limit_s: The TTFT from which on a request is late.
        """
        self._number += 1
        while self._iterations and self._number - self._iterations[0].number >= _COMMITS:
            self._judge(oldest := self._iterations.popleft(), oldest.predicted_s)
        if arrivals_s:
            self._iterations.append(
                _Iteration(self._number, batch, start_s, predicted_s, arrivals_s, limit_s)
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
        for arrival_s in iteration.arrivals_s:
            is_late = end_s - arrival_s > iteration.limit_s
            log_factor = self._log_factor + (-_STEP_DOWN if is_late else _STEP_UP)
            self._log_factor = min(max(log_factor, _LEAST), 0.0)
