"""Offline requests that wait for admission, first come first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["OfflineWaiting"]

Req = Any


class OfflineWaiting:
    """A FIFO of SGLang ``Req`` objects, with one scheduling pass of cool-down for those put back.

    With overlap scheduling the result of a request's last forward pass is still
    queued when the request is released; admitted again in the same pass, it
    would take that stale result for its own.
    """

    def __init__(self) -> None:
        self._ready: deque[Req] = deque()
        self._cooling: deque[Req] = deque()

    def __len__(self) -> int:
        """Count all waiting requests, cooling ones included."""
        return len(self._ready) + len(self._cooling)

    def __iter__(self) -> Iterator[Req]:
        """Iterate in the order of admission."""
        yield from self._cooling
        yield from self._ready

    @property
    def has_ready(self) -> bool:
        """True when a request may be admitted in this pass."""
        return bool(self._ready)

    def append(self, req: Req) -> None:
        """Add a request that has not run yet."""
        self._ready.append(req)

    def put_back(self, req: Req) -> None:
        """Return a request that ran and was released: first in line, from the next pass on."""
        self._cooling.appendleft(req)

    def start_pass(self) -> None:
        """End the cool-down of requests put back in earlier passes."""
        while self._cooling:
            self._ready.appendleft(self._cooling.pop())

    def take(self, count: int) -> list[Req]:
        """Remove and return up to ``count`` ready requests. O(count)."""
        return [self._ready.popleft() for _ in range(min(count, len(self._ready)))]

    def untake(self, reqs: Iterable[Req]) -> None:
        """Return requests, in their order, that were taken in this pass but not admitted."""
        self._ready.extendleft(reversed(list(reqs)))

    def remove_if(self, predicate: Callable[[Req], bool]) -> list[Req]:
        """Remove and return all requests for which ``predicate`` holds. O(n)."""
        removed = [req for req in self if predicate(req)]
        if removed:
            gone = {id(req) for req in removed}
            self._ready = deque(req for req in self._ready if id(req) not in gone)
            self._cooling = deque(req for req in self._cooling if id(req) not in gone)
        return removed
