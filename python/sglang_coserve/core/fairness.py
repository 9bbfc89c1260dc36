"""Orders waiting online requests: by arrival, or fairly between users."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step import StepResult

__all__ = ["ArrivalOrder", "VirtualTokenCounter", "WaitingOrder"]

_INPUT_WEIGHT: Final = 1.0
_OUTPUT_WEIGHT: Final = 2.0

_MOST_USERS: Final = 1 << 14
"""Bounds the memory: clients choose their user names freely."""


class WaitingOrder(Protocol):
    """The order in which waiting online requests are served."""

    def ordered(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """Return the waiting requests in the order to serve them, without changing any state."""
        ...

    def users(self, waiting: Sequence[Request]) -> frozenset[str | None] | None:
        """Return the users with waiting requests; None if the order does not depend on users."""
        ...

    def started(self, waiting_users: frozenset[str | None] | None) -> None:
        """Record that a step began while requests of these users waited."""
        ...

    def served(self, result: StepResult) -> None:
        """Record the service that requests got in a step. O(online requests)."""
        ...


class ArrivalOrder:
    """First come, first served, which is the order of the waiting requests in a snapshot."""

    def ordered(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """See ``WaitingOrder.ordered``."""
        return waiting

    def users(self, _waiting: Sequence[Request]) -> None:
        """See ``WaitingOrder.users``; always None."""

    def started(self, _waiting_users: frozenset[str | None] | None) -> None:
        """See ``WaitingOrder.started``; does nothing."""

    def served(self, _result: StepResult) -> None:
        """See ``WaitingOrder.served``; does nothing."""


class VirtualTokenCounter:
    """Serves the user with the least service so far (VTC: Sheng et al., OSDI 24; HyGen §4.1).

    One counter per user sums the service of its online requests: input tokens, and
    output tokens with twice the weight. When a user without waiting requests gets one again,
    its counter is raised to the least counter of the users who wait, so that nobody saves up
    service by idling. Requests of one user keep their order.

    Input is counted as it is computed, so cached tokens cost the user nothing. Requests without
    a user share the user ``None``. With more than 16,384 users, up to 8,192 that have no waiting
    requests are forgotten, the least served first; a forgotten or new user starts with the
    largest counter among all that were forgotten.
    """

    def __init__(self) -> None:
        self._counters: dict[str | None, float] = {}
        self._waiting_users: frozenset[str | None] = frozenset()
        self._unknown = 0.0
        """Initial counter of a new or forgotten user."""

    @property
    def counters(self) -> dict[str | None, float]:
        """The weighted service of each user so far (a copy)."""
        return dict(self._counters)

    def ordered(self, waiting: Sequence[Request]) -> Iterator[Request]:
        """See ``WaitingOrder.ordered``. O(waiting + taken · log users).

        A request that the caller takes is charged at once, as if it were served in full.
        """
        queues: dict[str | None, deque[Request]] = {}
        for request in waiting:
            queues.setdefault(request.info.user, deque()).append(request)
        counters = self._lifted(queues)
        # Ties go to users who have just come, then to the first among the waiting; ``place`` is
        # unique, so queues are never compared.
        heap = [
            (counters[user], user in self._waiting_users, place, queue)
            for place, (user, queue) in enumerate(queues.items())
        ]
        heapq.heapify(heap)
        while heap:
            counter, stayed, place, queue = heap[0]
            request = queue.popleft()
            yield request
            if queue:
                counter += _INPUT_WEIGHT * request.tokens_to_compute + _OUTPUT_WEIGHT
                heapq.heapreplace(heap, (counter, stayed, place, queue))
            else:
                heapq.heappop(heap)

    def users(self, waiting: Sequence[Request]) -> frozenset[str | None]:
        """See ``WaitingOrder.users``. O(waiting)."""
        return frozenset(request.info.user for request in waiting)

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
        """Forget users without waiting requests, half of the limit at most. O(users log users),
        amortized over as many new users."""
        idle = [user for user in self._counters if user not in self._waiting_users]
        idle.sort(key=self._counters.__getitem__)
        for user in idle[: _MOST_USERS // 2]:
            self._unknown = max(self._unknown, self._counters.pop(user))

    def _lifted(self, users: Iterable[str | None]) -> dict[str | None, float]:
        """Return the counters of waiting users; those of newcomers are raised to the least."""
        counters = {user: self._counters.get(user, self._unknown) for user in users}
        stayed = [counters[user] for user in counters if user in self._waiting_users]
        if stayed:
            least = min(stayed)
            for user in counters:
                if user not in self._waiting_users:
                    counters[user] = max(counters[user], least)
        return counters
