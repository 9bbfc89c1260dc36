"""Offline requests that wait for admission, first come first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sglang_coserve.srt.admission.cool_down import CoolDown

__all__ = ["OfflineWaiting"]

Req = Any


class OfflineWaiting:
    """A FIFO of SGLang ``Req`` objects, with a cool-down for those put back."""

    def __init__(self, passes_to_settle: int = 1) -> None:
        """``passes_to_settle``: see ``CoolDown``."""
        self._ready: deque[Req] = deque()
        self._cooling = CoolDown(passes_to_settle)

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
        """Return a request that ran and was released: first in line, after the cool-down."""
        self._cooling.put_back(req)

    def start_pass(self) -> None:
        """Count a pass of the cool-downs."""
        self._ready.extendleft(self._cooling.start_pass())

    def take(self, count: int) -> list[Req]:
        """Remove and return up to ``count`` ready requests. O(count)."""
        return [self._ready.popleft() for _ in range(min(count, len(self._ready)))]

    def put_back_taken(self, reqs: Iterable[Req]) -> None:
        """Return requests, in their order, that were taken in this pass but not admitted."""
        self._ready.extendleft(reversed(list(reqs)))

    def remove_if(self, predicate: Callable[[Req], bool]) -> list[Req]:
        """Remove and return all requests for which ``predicate`` holds. O(n)."""
        removed = [req for req in self if predicate(req)]
        if removed:
            gone = {id(req) for req in removed}
            self._ready = deque(req for req in self._ready if id(req) not in gone)
            self._cooling.remove(lambda req: id(req) in gone)
        return removed
