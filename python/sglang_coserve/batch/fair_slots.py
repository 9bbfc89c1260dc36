"""Which batch may send its next line: a semaphore that is fair in tokens.

Each batch is a lane. Lanes of one priority share in proportion to their weights, by
virtual token counters: the lane that has taken the fewest tokens per weight goes next,
and one that joins, or comes back, starts level with the least served, so that having
been away earns nothing (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024, section 4.1). Two lanes that both always wait differ by one line's
tokens per weight at most. A line counts as what it is expected to take while it is in
flight, and as what it took from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["FairSlots", "Lane"]


class Lane:
    """One batch, as the slots see it."""

    def __init__(self, priority: int, weight: float, deadline_s: float) -> None:
        self.priority = priority
        self.weight = weight
        self.deadline_s = deadline_s
        self.is_urgent = False
        """True to go before every lane that is not, whatever its priority, the earliest
        deadline first."""

        self.served_per_weight = 0.0
        """Tokens of finished lines per weight, and what was given for having been away."""

        self.tokens_in_flight = 0
        """What the lines in flight are expected to take."""

        self.lines_in_flight = 0

    @property
    def taken_per_weight(self) -> float:
        """What the lane with the smallest value is next by."""
        return self.served_per_weight + self.tokens_in_flight / self.weight


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a waiting lane asks for."""

    size_bytes: int
    estimated_tokens: int
    granted: asyncio.Future[None]


class FairSlots:
    """At most ``max_lines()`` lines in flight, of ``max_bytes`` together; a larger one alone."""

    def __init__(self, max_lines: Callable[[], int], max_bytes: int) -> None:
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self.lines_in_flight = 0
        self.bytes_in_flight = 0
        self._waiting: dict[Lane, _Turn] = {}
        self._lanes: set[Lane] = set()
        self._is_granting = False

    def join(self, lane: Lane) -> None:
        """Let ``lane`` take part."""
        self._lanes.add(lane)
        self._level(lane)

    def leave(self, lane: Lane) -> None:
        """Let ``lane`` take part no more; its lines in flight are still to be released."""
        self._lanes.discard(lane)

    async def acquire(self, lane: Lane, size_bytes: int, estimated_tokens: int) -> None:
        """Wait until ``lane`` may send its next line. One call per lane at a time."""
        assert lane in self._lanes and lane not in self._waiting
        if not lane.lines_in_flight:
            self._level(lane)
        turn = _Turn(size_bytes, estimated_tokens, asyncio.get_running_loop().create_future())
        self._waiting[lane] = turn
        self._grant_soon()
        try:
            await turn.granted
        except asyncio.CancelledError:
            if turn.granted.cancelled():
                self._waiting.pop(lane, None)
            else:
                self.release(lane, size_bytes, estimated_tokens, 0)
            raise

    def release(self, lane: Lane, size_bytes: int, estimated_tokens: int, tokens: int) -> None:
        """Give back what ``acquire`` took; the line has taken ``tokens``."""
        self.lines_in_flight -= 1
        self.bytes_in_flight -= size_bytes
        lane.lines_in_flight -= 1
        lane.tokens_in_flight -= estimated_tokens
        lane.served_per_weight += tokens / lane.weight
        self._grant_soon()

    def _level(self, lane: Lane) -> None:
        """Take from an idle lane what it would have saved up."""
        others = [
            other.served_per_weight
            for other in self._lanes
            if other is not lane
            and other.priority == lane.priority
            and (other.lines_in_flight or other in self._waiting)
        ]
        if others:
            lane.served_per_weight = max(lane.served_per_weight, min(others))

    def _grant_soon(self) -> None:
        if not self._is_granting:
            self._is_granting = True
            asyncio.get_running_loop().call_soon(self._grant)

    def _grant(self) -> None:
        """Grant one turn. The next one waits until the lane that had this one can ask again.

        When many lines end at once, it would otherwise be the other lanes' turn only
        because they were there.
        """
        self._is_granting = False
        while self._waiting:
            lane = min(self._waiting, key=_sort_key)
            turn = self._waiting[lane]
            if turn.granted.cancelled():
                del self._waiting[lane]
                continue
            if self._has_room(turn.size_bytes):
                del self._waiting[lane]
                self.lines_in_flight += 1
                self.bytes_in_flight += turn.size_bytes
                lane.lines_in_flight += 1
                lane.tokens_in_flight += turn.estimated_tokens
                turn.granted.set_result(None)
                self._grant_soon()
            return

    def _has_room(self, size_bytes: int) -> bool:
        if not self.lines_in_flight:
            return True
        return (
            self.lines_in_flight < self._max_lines()
            and self.bytes_in_flight + size_bytes <= self._max_bytes
        )


def _sort_key(lane: Lane) -> tuple[bool, float, float, float]:
    """The smallest goes next."""
    deadline_s = lane.deadline_s if lane.is_urgent else 0.0
    return (not lane.is_urgent, deadline_s, -lane.priority, lane.taken_per_weight)
