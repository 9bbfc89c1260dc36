"""The offline requests that a plan may admit or retract, in the order in which to take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from sglang_coserve.core.offline_queue import OfflineQueue, QueuedRequest
from sglang_coserve.core.planning.step_requests import StepRequests
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import PrefixCache, Request

__all__ = ["OfflineCandidates", "last_admitted_first", "yields_first"]


class OfflineCandidates:
    """The candidates of the queue, each with its tokens in the prefix cache; without those whose KV
    is being loaded.

    A plan may compose several steps, of which it takes the best, and each begins with the same
    requests. So what was found out of them is kept for the next step. The queue must not change
    meanwhile.
    """

    def __init__(self, queue: OfflineQueue, cache: PrefixCache, now_s: float) -> None:
        """Look nothing up yet."""
        self._known: list[tuple[QueuedRequest, int]] = []
        self._others = (
            (request, cached_tokens)
            for request in queue.candidates(now_s)
            if (cached_tokens := cache.cached_tokens(request.rid)) is not None
        )

    def __iter__(self) -> Iterator[tuple[QueuedRequest, int]]:
        """Yield them from the first one on. Each is looked up when it is first asked for."""
        known = self._known
        for place in count():
            if place == len(known):
                found = next(self._others, None)
                if found is None:
                    return
                known.append(found)
            yield known[place]


_RANK = {
    RequestState.PARKED: 0,
    RequestState.PAUSED: 1,
    RequestState.PREFILLING: 2,
    RequestState.DECODING: 2,
}


def yields_first(request: Request) -> int:
    """Return the retraction rank of a request: parked (0), then paused (1), then running (2)."""
    return _RANK[request.state]


def last_admitted_first(requests: StepRequests) -> Sequence[Request]:
    """Return the offline requests in the order of retraction: parked, paused, running.

    Within a rank, the last admitted comes first, since the oldest are closest to their end.
    O(requests log requests); called only when KV is short.
    """
    admitted = {request.info.rid: place for place, request in enumerate(requests.snapshot.admitted)}
    return sorted(
        requests.offline, key=lambda request: (yields_first(request), -admitted[request.info.rid])
    )
