"""One clock for all ranks: rank 0's, carried by the broadcast of requests.

Ranks that decide by their own clocks would decide differently, and hang in the
next collective.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

__all__ = ["Tick", "TickSource"]


@dataclass(frozen=True, slots=True)
class Tick:
    """The time on rank 0 at the start of an iteration."""

    now_s: float


class TickSource:
    """Sits where SGLang blocks input: adds a ``Tick`` to what rank 0 receives."""

    def __init__(self, inner: Any, *, is_source: bool) -> None:
        self._inner = inner
        self._is_source = is_source

    def handle(self, recv_reqs: list[Any] | None) -> list[Any] | None:
        """Return the received requests, on the source rank with a tick before them."""
        if self._inner is not None:
            recv_reqs = self._inner.handle(recv_reqs)
        if self._is_source and recv_reqs is not None:
            return [Tick(time.perf_counter()), *recv_reqs]
        return recv_reqs
