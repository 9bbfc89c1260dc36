"""The waiting offline requests that a plan may admit, in the order in which to take them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from sglang_coserve.core.offline_queue import OfflineQueue, QueuedRequest
from sglang_coserve.core.snapshot import PrefixCache

__all__ = ["OfflineCandidates"]


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
