"""Free space in the engine's KV pools, for plans and before retractions.

Most models keep all KV in one pool. If layers with a sliding window have a separate pool
(hybrid SWA: gpt-oss, Gemma 4, Llama 4, …), a token takes a slot of both, and frees its slot of
the window's pool once it is behind the window: either pool may run full first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang_coserve.srt import compat


class KvByClass(NamedTuple):
    """Slots of the pool of whole contexts: what requests hold, what only the radix cache does,
    and the rest."""

    online: int
    offline: int
    cached: int
    free: int


Req = Any


class KvPools:
    """The pools of one scheduler; each call is O(1), unless it says otherwise."""

    def __init__(self, scheduler: Any) -> None:
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._tree = scheduler.tree_cache
        self._has_window = scheduler.is_hybrid_swa
        # Without full-attention layers only the window's pool can run full.
        self._has_full = not self._has_window or bool(scheduler.full_tokens_per_layer)
        self.total_tokens = int(scheduler.max_total_num_tokens)
        """Slots of the pool of whole contexts."""

        self.window_tokens = self._most_window_tokens(scheduler) if self._has_window else 0
        """See ``EngineSnapshot``."""

    @property
    def free_tokens(self) -> int:
        """Unused slots of the full-attention pool."""
        if not self._has_window:
            return int(self._allocator.available_size())
        if not self._has_full:
            return self.total_tokens
        return int(self._allocator.full_available_size())

    @property
    def evictable_tokens(self) -> int:
        """Slots of the full-attention pool that only the radix cache holds."""
        if not self._has_window:
            return int(self._tree.evictable_size())
        if not self._has_full:
            return 0
        return int(self._tree.full_evictable_size())

    @property
    def free_window_tokens(self) -> int:
        """See ``EngineSnapshot``."""
        if not self._has_window:
            return 0
        return int(self._allocator.swa_available_size() + self._tree.swa_evictable_size())

    @property
    def headroom_tokens(self) -> int:
        """Number of tokens for which every pool has a free slot, or one held only by the radix
        cache."""
        free_tokens = self.free_tokens + self.evictable_tokens
        return min(free_tokens, self.free_window_tokens) if self._has_window else free_tokens

    def by_class(self, online: Sequence[Req], offline: Sequence[Req]) -> KvByClass:
        """Return who holds the slots of that pool, given the requests with KV of each class.

        What requests of both use is an online one's, and what is not of these requests, too: it
        gives way to nobody. O(requests + nodes of the radix cache above them).
        """
        free, cached = self.free_tokens, self.evictable_tokens
        used = max(0, self.total_tokens - free - cached)
        held = min(self._held_alone(offline, besides=online), used) if offline else 0
        return KvByClass(online=used - held, offline=held, cached=cached, free=free)

    def _held_alone(self, reqs: Sequence[Req], *, besides: Sequence[Req]) -> int:
        """Return the slots of that pool that only these requests hold, and not those ``besides``.

        Those are the nodes of the radix cache with their KV, each once, and the pages behind
        these. O(requests + nodes).
        """
        cached_tokens = compat.cached_tokens_of(self._tree, reqs, besides)
        own_tokens = sum(
            self._whole_pages(compat.allocated_tokens(req)) - compat.protected_tokens(req)
            for req in reqs
        )
        return cached_tokens + own_tokens

    def held_in_window(self, reqs: Sequence[Req]) -> int:
        """Return the slots that requests hold at most of the pool of a window. O(requests)."""
        most = self.window_tokens
        return sum(min(self._whole_pages(compat.allocated_tokens(req)), most) for req in reqs)

    def _whole_pages(self, tokens: int) -> int:
        page = int(self._tree.page_size)
        return -(-tokens // page) * page

    def _most_window_tokens(self, scheduler: Any) -> int:
        page = scheduler.page_size
        window_pages = -(-self._tree.sliding_window_size // page) + 1
        # If the pool is smaller than that, it has room for only one request at a time.
        return int(min(window_pages * page, scheduler.swa_tokens_per_layer - page))
