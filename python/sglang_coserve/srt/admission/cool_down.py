"""Requests that were put back, until no result of them can be under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["CoolDown"]

Req = Any


class CoolDown:
    """Keeps SGLang ``Req`` objects that ran and were released out of the next passes.

    With overlap scheduling the result of a request's last forward pass is still
    queued when the request is released; admitted again in the same pass, it
    would take that stale result for its own. In a pipeline results are under way for longer.
    """

    def __init__(self, passes: int) -> None:
        """``passes`` are those until a result that is under way has come."""
        self._passes: deque[list[Req]] = deque([] for _ in range(passes))
        """Those put back in each of the last passes, the oldest first."""

    def __len__(self) -> int:
        return sum(map(len, self._passes))

    def __iter__(self) -> Iterator[Req]:
        """Iterate over the requests, the last one first."""
        for reqs in reversed(self._passes):
            yield from reversed(reqs)

    def put_back(self, req: Req) -> None:
        """Add a request."""
        self._passes[-1].append(req)

    def start_pass(self) -> list[Req]:
        """Count a pass; remove and return those that may be admitted in it, in order."""
        ready = self._passes.popleft()
        self._passes.append([])
        return ready

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Remove and return all requests that match. O(n)."""
        removed = []
        for reqs in self._passes:
            removed += [req for req in reqs if matches(req)]
            reqs[:] = [req for req in reqs if not matches(req)]
        return removed
