"""What the engine's KV pools have left, for plans and before evictions.

Most models keep all KV in one pool. Where layers with a sliding window have one of their own
(hybrid SWA: gpt-oss, Gemma 4, Llama 4, …), a token takes a slot of both, and gives that of the
window's back once it is behind the window: either pool may be the one that is full.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from sglang_coserve.srt.compat import computed_tokens, protected_tokens

__all__ = ["KvByClass", "KvPools"]


class KvByClass(NamedTuple):
    """Slots of the pool of whole contexts: what requests hold, what only the radix cache does,
    and the rest."""

    online: int
    offline: int
    cached: int
    free: int


class KvPools:
    """The pools of one scheduler; each call is O(1), unless it says otherwise."""

    def __init__(self, scheduler: Any) -> None:
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._tree = scheduler.tree_cache
        self._has_window = scheduler.is_hybrid_swa
        # Without layers of whole contexts nothing but the window's pool is ever short.
        self._has_full = not self._has_window or bool(scheduler.full_tokens_per_layer)
        self.total_tokens = int(scheduler.max_total_num_tokens)
        """Slots of the pool of whole contexts."""

        self._page_tokens = int(self._tree.page_size)
        self.window_tokens = self._most_window_tokens(scheduler) if self._has_window else 0
        """As of ``EngineSnapshot``."""

    @property
    def free_tokens(self) -> int:
        """Slots that nothing holds, of the pool of whole contexts."""
        if not self._has_window:
            return int(self._allocator.available_size())
        if not self._has_full:
            return self.total_tokens
        return int(self._allocator.full_available_size())

    @property
    def evictable_tokens(self) -> int:
        """Slots of that pool that only the radix cache holds."""
        if not self._has_window:
            return int(self._tree.evictable_size())
        if not self._has_full:
            return 0
        return int(self._tree.full_evictable_size())

    @property
    def free_window_tokens(self) -> int:
        """As of ``EngineSnapshot``."""
        if not self._has_window:
            return 0
        return int(self._allocator.swa_available_size() + self._tree.swa_evictable_size())

    @property
    def headroom_tokens(self) -> int:
        """How many tokens have a slot in every pool now, or after the radix cache gave some up."""
        free_tokens = self.free_tokens + self.evictable_tokens
        return min(free_tokens, self.free_window_tokens) if self._has_window else free_tokens

    def by_class(self, online: Iterable[Any]) -> KvByClass:
        """Return who holds the slots of that pool, given the online requests with KV.

        What requests of both classes use is an online one's. O(requests + nodes above them).
        """
        free, cached = self.free_tokens, self.evictable_tokens
        used = max(0, self.total_tokens - free - cached)
        held = min(self._held_tokens(online), used)
        return KvByClass(online=held, offline=used - held, cached=cached, free=free)

    def _held_tokens(self, reqs: Iterable[Any]) -> int:
        """Return the slots of that pool that these requests hold, each slot counted once.

        Those are the nodes of the radix cache above each of them, and what is behind these in
        its own pages. O(requests + nodes). Where the cache shows no nodes (SGLang's in Rust), what
        requests share counts for each.
        """
        page, tokens = self._page_tokens, 0
        seen: set[int] = set()
        for req in reqs:
            own_tokens = computed_tokens(req) - protected_tokens(req)
            tokens += max(0, -(-own_tokens // page) * page)
            try:
                node = self._tree.resolve_node_handle(req.last_node)
            except NotImplementedError:
                tokens += protected_tokens(req)
                continue
            while node is not None and node.parent is not None and id(node) not in seen:
                seen.add(id(node))
                tokens += len(node.key)
                node = node.parent
        return tokens

    def _most_window_tokens(self, scheduler: Any) -> int:
        page = scheduler.page_size
        window_pages = -(-self._tree.sliding_window_size // page) + 1
        # A pool that is smaller than that has room for one request at a time.
        return int(min(window_pages * page, scheduler.swa_tokens_per_layer - page))
