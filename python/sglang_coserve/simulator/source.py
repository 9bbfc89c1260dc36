"""Supplies the requests of a simulation."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator

from sglang_coserve.simulator.request import SimRequest

__all__ = ["TrafficSource"]


class TrafficSource:
    """Timed arrivals in order, and a backlog that keeps the offline queue filled."""

    def __init__(
        self,
        timed: Iterable[Iterable[SimRequest]] = (),
        backlog: Iterable[SimRequest] = (),
        backlog_depth: int = 0,
    ) -> None:
        """Merge ``timed`` streams, each in arrival order.

        ``backlog`` requests arrive when fewer than ``backlog_depth`` offline requests wait.
        """
        self._timed = heapq.merge(*timed, key=_arrival_s)
        self._next = next(self._timed, None)
        self._backlog: Iterator[SimRequest] = iter(backlog)
        self._backlog_depth = backlog_depth

    @property
    def next_arrival_s(self) -> float:
        """Arrival time of the next timed request; infinite if there is none."""
        return math.inf if self._next is None else self._next.info.arrival_s

    def arrived(self, until_s: float) -> Iterator[SimRequest]:
        """Yield and remove the timed requests that arrive at or before ``until_s``."""
        while self._next is not None and self._next.info.arrival_s <= until_s:
            request, self._next = self._next, next(self._timed, None)
            yield request

    def close(self) -> None:
        """Discard all remaining timed requests."""
        self._next = None

    def refill(self, num_waiting: int, now_s: float) -> Iterator[SimRequest]:
        """Yield the requests that are missing to reach ``backlog_depth``, arriving now."""
        for _ in range(num_waiting, self._backlog_depth):
            request = next(self._backlog, None)
            if request is None:
                return
            request.arrive_at(now_s)
            yield request


def _arrival_s(request: SimRequest) -> float:
    return request.info.arrival_s
