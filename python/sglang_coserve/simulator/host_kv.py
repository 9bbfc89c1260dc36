"""KV in host memory: how it is saved (ConServe §4.4), and how it comes back.

As on the engine (``srt.kv_checkpoint``), a request of which the host has more than the device is
held back when it is planned, and planned again once that KV is on the device. What was loaded is in
the prefix cache, so it can be evicted like any other prefix that nobody uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sglang_coserve.core.kv_loads import most_loaded_tokens
from sglang_coserve.core.prefix_tree import Node
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.request_kv import RequestKv


@dataclass(frozen=True, slots=True)
class _Load:
    request: SimRequest
    tokens: bytes
    """Its tokens, of which the request may know more when it runs elsewhere."""

    node: Node
    """The end of what the device had of them, which is locked meanwhile."""

    pages: int
    end_s: float


class HostKv:
    """Saves KV of running offline requests in the background, and loads that of waiting ones.

    Full pages are saved first in, first out. Loads are of one request at a time, in the order in
    which they were planned. Each direction has a link of ``tokens_per_s``, with 0 there are no
    copies. Where the device has no room for it, a request is not held back, and computes it again.
    """

    def __init__(
        self, kv: RequestKv, tokens_per_s: float, waiting: Callable[[str], SimRequest | None]
    ) -> None:
        """``waiting`` returns the request of a rid while it waits."""
        self._kv = kv
        self._tokens_per_s = tokens_per_s
        self._waiting = waiting
        self._dirty: dict[SimRequest, None] = {}
        """Those with unsaved full pages, in order."""

        self._credit_tokens = 0.0
        capacity_tokens = kv.capacity_pages * kv.page_tokens
        self._most_pages = most_loaded_tokens(capacity_tokens) // kv.page_tokens
        self._held: dict[str, SimRequest] = {}
        """The first of them is being loaded, or is next."""

        self._load: _Load | None = None

    @property
    def saves(self) -> bool:
        """Whether there are copies."""
        return self._tokens_per_s > 0

    def mark(self, request: SimRequest) -> None:
        """Queue the unsaved full pages of a request. O(1)."""
        self._dirty.setdefault(request)

    def save(self, seconds: float) -> None:
        """Simulate copying for this time. O(requests completed)."""
        page_tokens = self._kv.page_tokens
        self._credit_tokens += seconds * self._tokens_per_s
        while self._dirty:
            request = next(iter(self._dirty))
            full_tokens = self._kv.whole_pages_of(request.computed_tokens)
            missing = full_tokens - request.saved_tokens
            if missing > self._credit_tokens:
                pages = int(self._credit_tokens) // page_tokens
                request.saved_tokens += pages * page_tokens
                self._credit_tokens -= pages * page_tokens
                return
            if missing > 0:
                request.saved_tokens = full_tokens
                self._credit_tokens -= missing
            del self._dirty[request]
        # Time in which the link is idle is lost.
        self._credit_tokens = 0.0

    @property
    def pages(self) -> int:
        """Pages of the device that are being filled."""
        return 0 if self._load is None else self._load.pages

    @property
    def next_s(self) -> float:
        """When there is something to do; infinite for never."""
        if self._load is not None:
            return self._load.end_s
        return -math.inf if self._held else math.inf

    def is_held(self, rid: str) -> bool:
        """Return whether a request waits for its KV."""
        return rid in self._held

    def hold_back(self, planned: Iterable[SimRequest], now_s: float) -> bool:
        """Return whether any of these waiting requests is held back from now on. O(prompts)."""
        before = len(self._held)
        for request in planned:
            if self._held:
                if self._kv.tokens_on_host(request):
                    self._held[request.info.rid] = request
            elif self._begin(request, now_s):
                self._held[request.info.rid] = request
        return len(self._held) > before

    def advance(self, now_s: float) -> None:
        """End the load that is complete by now, and go on; to be called before each plan.

        The next request's load begins with the next call: until then the loaded one can be
        admitted, which keeps its KV from being evicted for that.
        """
        if self._load is None:
            self._go_on(now_s)
            return
        while self._load is not None and self._load.end_s <= now_s:
            load, self._load = self._load, None
            tokens = load.pages * self._kv.page_tokens
            self._kv.put(load.node, load.tokens, tokens)
            if self._waits(load.request):
                load.request.loaded_to_tokens = load.node.depth_tokens + tokens
                load.request.loaded_tokens += tokens
            if not self._waits(load.request) or not self._begin(load.request, now_s):
                del self._held[load.request.info.rid]

    def _go_on(self, now_s: float) -> None:
        while self._held:
            request = next(iter(self._held.values()))
            if self._waits(request) and self._begin(request, now_s):
                return
            del self._held[request.info.rid]

    def _waits(self, request: SimRequest) -> bool:
        return self._waiting(request.info.rid) is request

    def _begin(self, request: SimRequest, now_s: float) -> bool:
        """Begin to load what the device lacks, as much as may be on its way and has room; return
        whether that is anything."""
        kv = self._kv
        wanted = kv.tokens_on_host(request) // kv.page_tokens
        if not wanted:
            return False
        node = kv.lock_cached(request)
        pages = min(wanted, kv.room_pages, self._most_pages)
        if not pages:
            kv.cache.unlock(node, kv.now_s)
            return False
        kv.allocate(pages)
        end_s = now_s + pages * kv.page_tokens / self._tokens_per_s
        self._load = _Load(request, request.tokens, node, pages, end_s)
        return True
