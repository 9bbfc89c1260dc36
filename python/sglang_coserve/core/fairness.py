"""The order of waiting online requests: by arrival, or fair between users."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

from sglang_coserve.core.snapshot import Row
from sglang_coserve.core.step import StepResult

__all__ = ["ArrivalOrder", "VirtualTokenCounter", "WaitingOrder"]

_INPUT_WEIGHT: Final = 1.0
_OUTPUT_WEIGHT: Final = 2.0

_MOST_USERS: Final = 1 << 14
"""Bounds the memory: users name themselves."""


class WaitingOrder(Protocol):
    """In which order waiting online requests are served."""

    def ordered(self, waiting: Sequence[Row]) -> Iterable[Row]:
        """Return the waiting rows in the order to serve them; changes nothing."""
        ...

    def users(self, waiting: Sequence[Row]) -> frozenset[str | None] | None:
        """Return whose requests wait, if that matters; changes nothing."""
        ...

    def started(self, waiting_users: frozenset[str | None] | None) -> None:
        """Note that a step began while requests of these users waited."""
        ...

    def served(self, result: StepResult) -> None:
        """Note what requests got. O(online rows)."""
        ...


class ArrivalOrder:
    """First come, first served; a snapshot lists the waiting rows so."""

    def ordered(self, waiting: Sequence[Row]) -> Iterable[Row]:
        """See ``WaitingOrder.ordered``."""
        return waiting

    def users(self, _waiting: Sequence[Row]) -> None:
        """See ``WaitingOrder.users``; it does not matter."""

    def started(self, _waiting_users: frozenset[str | None] | None) -> None:
        """See ``WaitingOrder.started``; nothing is noted."""

    def served(self, _result: StepResult) -> None:
        """See ``WaitingOrder.served``; nothing is counted."""


class VirtualTokenCounter:
    """The user who was served least is next (VTC: Sheng et al., OSDI 24; cited by HyGen §4.1).

    A counter per user sums the service its online requests got: input tokens, and
    output tokens with twice the weight. A user who comes back after a time
    without waiting requests is lifted to the least counter of those who wait, so
    that nobody saves up service by idling. One user's requests keep their order.

    Input counts as it is computed, so what was cached costs its user nothing.
    Requests without a user count for one common user, ``None``. Of very many users those who
    were served least, and wait for nothing, are forgotten: who is not known counts as one
    who was served as much as any of them.
    """

    def __init__(self) -> None:
        self._counters: dict[str | None, float] = {}
        self._waiting_users: frozenset[str | None] = frozenset()
        self._unknown = 0.0
        """The counter of a user who is not known."""

    @property
    def counters(self) -> dict[str | None, float]:
        """The weighted service of each user so far; a copy."""
        return dict(self._counters)

    def ordered(self, waiting: Sequence[Row]) -> Iterator[Row]:
        """See ``WaitingOrder.ordered``. O(waiting + taken · log users).

        A row that is taken counts at once for the next choice, as if served in full.
        """
        queues: dict[str | None, deque[Row]] = {}
        for row in waiting:
            queues.setdefault(row.info.user, deque()).append(row)
        counters = self._lifted(queues)
        # Ties go to who has just come, then to who is first among the waiting; queues are never
        # compared.
        heap = [
            (counters[user], user in self._waiting_users, place, queue)
            for place, (user, queue) in enumerate(queues.items())
        ]
        heapq.heapify(heap)
        while heap:
            counter, stayed, place, queue = heap[0]
            row = queue.popleft()
            yield row
            if queue:
                counter += _INPUT_WEIGHT * row.tokens_to_compute + _OUTPUT_WEIGHT
                heapq.heapreplace(heap, (counter, stayed, place, queue))
            else:
                heapq.heappop(heap)

    def users(self, waiting: Sequence[Row]) -> frozenset[str | None]:
        """See ``WaitingOrder.users``. O(waiting)."""
        return frozenset(row.info.user for row in waiting)

    def started(self, waiting_users: frozenset[str | None] | None) -> None:
        """See ``WaitingOrder.started``."""
        users = waiting_users or frozenset()
        self._counters.update(self._lifted(users))
        self._waiting_users = users

    def served(self, result: StepResult) -> None:
        """See ``WaitingOrder.served``."""
        chunks = {chunk.rid: chunk.tokens for chunk in result.chunks}
        counters = self._counters
        for info, _, token_s in result.served:
            service = _INPUT_WEIGHT * chunks.get(info.rid, 0)
            if token_s is not None:
                service += _OUTPUT_WEIGHT
            counters[info.user] = counters.get(info.user, self._unknown) + service
        if len(counters) > _MOST_USERS:
            self._forget_idle()

    def _forget_idle(self) -> None:
        """Forget half of those who wait for nothing. O(users), each time that they doubled."""
        idle = [user for user in self._counters if user not in self._waiting_users]
        idle.sort(key=self._counters.__getitem__)
        for user in idle[: _MOST_USERS // 2]:
            self._unknown = max(self._unknown, self._counters.pop(user))

    def _lifted(self, users: Iterable[str | None]) -> dict[str | None, float]:
        """Return the counters of users who wait, with those who have just come lifted."""
        counters = {user: self._counters.get(user, self._unknown) for user in users}
        stayed = [counters[user] for user in counters if user in self._waiting_users]
        if stayed:
            least = min(stayed)
            for user in counters:
                if user not in self._waiting_users:
                    counters[user] = max(counters[user], least)
        return counters
