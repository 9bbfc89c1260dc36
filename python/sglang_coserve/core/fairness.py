"""The order of waiting online requests: by arrival, or fair between users."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, Protocol

from sglang_coserve.core.batch_builder import BatchBuilder
from sglang_coserve.core.snapshot import FairnessUpdate, Row

__all__ = ["ArrivalOrder", "VirtualTokenCounter", "WaitingOrder"]

_INPUT_WEIGHT: Final = 1.0
_OUTPUT_WEIGHT: Final = 2.0


class WaitingOrder(Protocol):
    """In which order waiting online requests are served."""

    def ordered(self, waiting: Sequence[Row]) -> Iterable[Row]:
        """Return the waiting rows in the order to serve them; changes nothing."""
        ...

    def update(self, batch: BatchBuilder) -> FairnessUpdate | None:
        """Return what running the batch changes; changes nothing itself."""
        ...

    def commit(self, update: FairnessUpdate) -> None:
        """Apply an update."""
        ...


class ArrivalOrder:
    """First come, first served; a snapshot lists the waiting rows so."""

    def ordered(self, waiting: Sequence[Row]) -> Iterable[Row]:
        """See ``WaitingOrder.ordered``."""
        return waiting

    def update(self, _batch: BatchBuilder) -> None:
        """See ``WaitingOrder.update``; nothing is counted."""

    def commit(self, _update: FairnessUpdate) -> None:
        """See ``WaitingOrder.commit``; there never is an update."""


class VirtualTokenCounter:
    """The user who was served least is next (VTC: Sheng et al., OSDI 24; cited by HyGen §4.1).

    A counter per user sums the service its online requests got: input tokens, and
    output tokens with twice the weight. A user who comes back after a time
    without waiting requests is lifted to the least counter of those who wait, so
    that nobody saves up service by idling. One user's requests keep their order.

    Input counts as it is computed, so what was cached costs its user nothing.
    Requests without a user count for one common user, ``None``.
    """

    def __init__(self) -> None:
        self._counters: dict[str | None, float] = {}
        self._waiting_users: frozenset[str | None] = frozenset()

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
        # Ties go to the user who comes first among the waiting; queues are never compared.
        heap = [
            (counters[user], place, queue) for place, (user, queue) in enumerate(queues.items())
        ]
        heapq.heapify(heap)
        while heap:
            counter, place, queue = heap[0]
            row = queue.popleft()
            yield row
            if queue:
                counter += _INPUT_WEIGHT * row.tokens_to_compute + _OUTPUT_WEIGHT
                heapq.heapreplace(heap, (counter, place, queue))
            else:
                heapq.heappop(heap)

    def update(self, batch: BatchBuilder) -> FairnessUpdate:
        """See ``WaitingOrder.update``. O(rows + waiting)."""
        waiting = batch.snapshot.waiting
        users = frozenset(row.info.user for row in waiting)
        counters = self._lifted(users)
        chunks = {chunk.rid: chunk.tokens for chunk in batch.chunks}
        decoding = batch.decoding
        for row in chain(batch.online_decodes, batch.online_prefills, waiting):
            info = row.info
            if tokens := chunks.get(info.rid):
                service = _INPUT_WEIGHT * tokens
                if tokens == row.tokens_to_compute:
                    service += _OUTPUT_WEIGHT
            elif info.rid in decoding and info.is_online:
                service = _OUTPUT_WEIGHT
            else:
                continue
            before = counters.get(info.user)
            counters[info.user] = service + (
                self._counters.get(info.user, 0.0) if before is None else before
            )
        return FairnessUpdate(counters, users)

    def commit(self, update: FairnessUpdate) -> None:
        """See ``WaitingOrder.commit``."""
        self._counters.update(update.counters)
        self._waiting_users = update.waiting_users

    def _lifted(self, users: Iterable[str | None]) -> dict[str | None, float]:
        """Return the counters of users who wait, with those who have just come lifted."""
        counters = {user: self._counters.get(user, 0.0) for user in users}
        stayed = [counters[user] for user in counters if user in self._waiting_users]
        if stayed:
            least = min(stayed)
            for user in counters:
                if user not in self._waiting_users:
                    counters[user] = max(counters[user], least)
        return counters
