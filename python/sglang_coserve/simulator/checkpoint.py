"""The modelled copies of offline KV in host memory (ConServe §4.4)."""

from __future__ import annotations

from collections import deque

from sglang_coserve.simulator.request import SimRequest

__all__ = ["HostCheckpoint"]


class HostCheckpoint:
    """Saves full pages of running offline requests in the background, first dirty first.

    The copies share one link: ``tokens_per_s`` towards the host, as much back.
    """

    def __init__(self, tokens_per_s: float, page_tokens: int) -> None:
        self._tokens_per_s = tokens_per_s
        self._page_tokens = page_tokens
        self._dirty: deque[SimRequest] = deque()
        self._queued: set[SimRequest] = set()
        self._credit_tokens = 0.0

    def mark(self, request: SimRequest) -> None:
        """Let the full pages of a row that are not saved yet be copied. O(1)."""
        if request not in self._queued:
            self._queued.add(request)
            self._dirty.append(request)

    def copy(self, seconds: float) -> None:
        """Copy for this long. O(requests that become clean, or gone)."""
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
        # An idle link saves nothing up for later.
        self._credit_tokens = 0.0

    def load_s(self, tokens: int) -> float:
        """Return the seconds to bring this many tokens back."""
        return tokens / self._tokens_per_s
