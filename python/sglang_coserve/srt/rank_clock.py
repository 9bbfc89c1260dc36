"""One clock for all ranks: rank 0's, carried by the broadcast of requests.

Ranks that decide by their own clocks would decide differently, and hang in the
next collective.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_coserve.srt.arrival_time import arrival_s

__all__ = ["RankClock", "Tick"]

Req = Any


@dataclass(frozen=True, slots=True)
class Tick:
    """The time on rank 0 at the start of an iteration."""

    now_s: float
    arrivals_s: Mapping[str, float]
    """When the requests that come with it arrived, by rid."""


class RankClock:
    """The time by which a rank decides, and when requests arrived: in seconds, of
    ``time.perf_counter`` on rank 0 where the clock is shared, else on this rank."""

    def __init__(self, *, is_shared: bool, is_source: bool) -> None:
        """``is_shared`` says whether ranks go by rank 0's time; ``is_source`` is for rank 0."""
        self._is_shared = is_shared
        self._is_source = is_source
        self._tick: Tick | None = None

    def carried_by(self, input_blocker: Any) -> Any:
        """Return what stands where SGLang blocks input, so that ticks come with the broadcast."""
        if not self._is_shared:
            return input_blocker
        return _TickSource(input_blocker, is_source=self._is_source)

    def take(self, tick: Tick) -> None:
        """Go by a tick from now on."""
        self._tick = tick

    def now_s(self) -> float:
        """Return the time: between two ticks, that of the first of them."""
        return time.perf_counter() if self._tick is None else self._tick.now_s

    def arrival_s(self, req: Req, now_s: float) -> float:
        """Return when a request that is new now arrived at the server."""
        if self._tick is None:
            return arrival_s(req, now_s)
        return self._tick.arrivals_s.get(req.rid, now_s)


class _TickSource:
    """Sits where SGLang blocks input: adds a ``Tick`` to what rank 0 receives."""

    def __init__(self, inner: Any, *, is_source: bool) -> None:
        self._inner = inner
        self._is_source = is_source

    def handle(self, recv_reqs: list[Any] | None) -> list[Any] | None:
        """Return the received requests, on the source rank with a tick before them."""
        if self._inner is not None:
            recv_reqs = self._inner.handle(recv_reqs)
        if self._is_source and recv_reqs is not None:
            now_s = time.perf_counter()
            arrivals_s = {req.rid: arrival_s(req, now_s) for req in _with_rid(recv_reqs)}
            return [Tick(now_s, arrivals_s), *recv_reqs]
        return recv_reqs


def _with_rid(received: list[Any]) -> list[Any]:
    """Return the messages that are requests; a batch of them holds its own."""
    flat = [one for item in received for one in getattr(item, "batch", None) or (item,)]
    return [item for item in flat if isinstance(getattr(item, "rid", None), str)]
