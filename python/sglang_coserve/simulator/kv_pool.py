"""Accounts for the device's KV slots: free, in the prefix cache, or private to a request."""

from __future__ import annotations

from sglang_coserve.simulator.prefix_cache import SimulatedPrefixCache

__all__ = ["KvPool"]


class KvPool:
    """Whole pages, each free, covered by the prefix cache, or private to one request.

    Every method is O(1), except for evictions that ``allocate`` makes.
    """

    def __init__(self, capacity_tokens: int, cache: SimulatedPrefixCache, page_tokens: int) -> None:
        self.cache = cache
        self.page_tokens = page_tokens
        self.capacity_pages = capacity_tokens // page_tokens
        self.private_pages = 0

    @property
    def capacity_tokens(self) -> int:
        """KV slots of all pages."""
        return self.capacity_pages * self.page_tokens

    @property
    def free_pages(self) -> int:
        """Unused pages."""
        return self.capacity_pages - self.private_pages - self.cached_pages

    @property
    def cached_pages(self) -> int:
        """Pages in the prefix cache, locked or not."""
        return self.cache.total_tokens // self.page_tokens

    @property
    def held_tokens(self) -> int:
        """KV slots that requests hold: private ones, and locked ones of the cache."""
        locked_tokens = self.cache.total_tokens - self.cache.evictable_tokens
        return self.private_pages * self.page_tokens + locked_tokens

    def pages_of(self, tokens: int) -> int:
        """Return the number of pages for this many tokens, rounded up."""
        return -(-tokens // self.page_tokens)

    def pages_in(self, tokens: int) -> int:
        """Return the number of whole pages among this many tokens."""
        return tokens // self.page_tokens

    def allocate(self, pages: int) -> None:
        """Allocate private pages, evicting from the prefix cache if too few are free."""
        missing = pages - self.free_pages
        if missing > 0:
            self.cache.evict(missing * self.page_tokens)
        assert pages <= self.free_pages, (
            f"the plan needs {pages} KV pages where {self.free_pages} can be had"
        )
        self.private_pages += pages

    def release(self, pages: int) -> None:
        """Free private pages."""
        assert 0 <= pages <= self.private_pages, f"{pages} of {self.private_pages} private pages"
        self.private_pages -= pages
