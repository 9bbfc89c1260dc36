"""Models the copies of offline KV in host memory (ConServe §4.4)."""

from __future__ import annotations

from collections import deque

from sglang_coserve.simulator.request import SimRequest

__all__ = ["HostCheckpoint"]


class HostCheckpoint:
    """Saves full pages of running offline requests in the background, first in, first out.

    All copies share one link of ``tokens_per_s`` in each direction (the other: ``HostLoads``).
    """

    def __init__(self, tokens_per_s: float, page_tokens: int) -> None:
        self._tokens_per_s = tokens_per_s
        self._page_tokens = page_tokens
        self._dirty: deque[SimRequest] = deque()
        self._queued: set[SimRequest] = set()
        self._credit_tokens = 0.0

    def mark(self, request: SimRequest) -> None:
        """Queue the unsaved full pages of a request. O(1)."""
        if request not in self._queued:
            self._queued.add(request)
            self._dirty.append(request)

    def copy(self, seconds: float) -> None:
        """Simulate copying for this time. O(requests completed)."""
        self._credit_tokens += seconds * self._tokens_per_s
        while self._dirty:
            request = self._dirty[0]
            full_tokens = request.computed_tokens // self._page_tokens * self._page_tokens
            missing = full_tokens - request.saved_tokens
            if missing > self._credit_tokens:
                pages = int(self._credit_tokens) // self._page_tokens
                request.saved_tokens += pages * self._page_tokens
                self._credit_tokens -= pages * self._page_tokens
                return
            if missing > 0:
                request.saved_tokens = full_tokens
                self._credit_tokens -= missing
            self._dirty.popleft()
            self._queued.remove(request)
        # Time in which the link is idle is lost.
        self._credit_tokens = 0.0

    def load_s(self, tokens: int) -> float:
        """Return the seconds to copy this many tokens back."""
        return tokens / self._tokens_per_s
