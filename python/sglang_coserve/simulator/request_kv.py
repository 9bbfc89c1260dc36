"""The KV of requests: pages of their own, and pages that they share in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_coserve.core.prefix_tree import Node, PrefixTree
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.request import SimRequest


class RequestKv:
    """Whole pages, each free, in the prefix cache, or private to one request."""

    def __init__(self, config: ExecutorConfig) -> None:
        self.page_tokens = config.page_tokens
        self.capacity_pages = config.kv_capacity_tokens // config.page_tokens
        self.private_pages = 0
        self.cache = PrefixTree(config.page_tokens)
        self._keeps_prefixes = config.prefix_cache
        self._sharing_version = 0
        self.now_s = 0.0
        self.online_lease_s = 0.0
        """Seconds by which prefixes of online requests are kept longer than others."""

    @property
    def free_pages(self) -> int:
        """Unused pages."""
        cached_pages = self.cache.total_tokens // self.page_tokens
        return self.capacity_pages - self.private_pages - cached_pages

    @property
    def room_pages(self) -> int:
        """Pages that can be allocated."""
        return self.free_pages + self.cache.evictable_tokens // self.page_tokens

    @property
    def held_tokens(self) -> int:
        """KV slots that requests hold: private ones, and locked ones of the cache."""
        locked_tokens = self.cache.total_tokens - self.cache.evictable_tokens
        return self.private_pages * self.page_tokens + locked_tokens

    def pages_of(self, tokens: int) -> int:
        """Return the number of pages for this many tokens, rounded up."""
        return -(-tokens // self.page_tokens)

    def whole_pages_of(self, tokens: int) -> int:
        """Return how many of this many tokens are in whole pages."""
        return tokens // self.page_tokens * self.page_tokens

    def allocate(self, pages: int) -> None:
        """Allocate private pages, evicting from the prefix cache if too few are free."""
        missing = pages - self.free_pages
        if missing > 0:
            self.cache.evict(missing * self.page_tokens)
        assert pages <= self.free_pages, (
            f"the plan needs {pages} KV pages where {self.free_pages} can be had"
        )
        self.private_pages += pages

    def free(self, pages: int) -> None:
        """Free private pages."""
        assert 0 <= pages <= self.private_pages, f"{pages} of {self.private_pages} private pages"
        self.private_pages -= pages

    def cached_tokens(self, request: SimRequest) -> int:
        """Return how many leading tokens of a waiting request the device holds."""
        return self.cache.match(request.tokens, self._usable_tokens(request))

    def tokens_on_host(self, request: SimRequest) -> int:
        """Return how many tokens after those are only in host memory, and of use; whole pages."""
        if not request.saved_tokens:
            return 0
        most = self.whole_pages_of(request.length_tokens - 1)
        return max(0, min(request.saved_tokens, most) - self.cached_tokens(request))

    def lock_cached(self, request: SimRequest) -> Node:
        """Lock what the device holds of a waiting request; return its end."""
        limit = self._usable_tokens(request)
        return self.cache.lock(request.tokens, limit) if limit else self.cache.root

    def put(self, node: Node, tokens: bytes, count: int) -> None:
        """Move private pages with ``count`` of these tokens behind the locked ``node`` to the
        prefix cache, where nobody holds them."""
        end = self.cache.extend(node, tokens, node.depth_tokens + count)
        self.free(count // self.page_tokens)
        self.cache.unlock(end, self.now_s)

    def admit(self, request: SimRequest) -> None:
        """Lock what the device holds of a request, which need not be computed."""
        request.lock = self.lock_cached(request)
        request.computed_tokens = locked = request.locked_tokens
        # What was loaded may have been evicted since, from its end.
        evicted = max(0, request.loaded_to_tokens - locked)
        reloaded = max(0, request.loaded_tokens - evicted)
        request.given_tokens += locked - reloaded
        request.reloaded_tokens += reloaded
        request.loaded_to_tokens = request.loaded_tokens = 0

    def _usable_tokens(self, request: SimRequest) -> int:
        """Return the most leading tokens of a waiting request that it may find on the device."""
        # The last token is always computed, because its logits are needed.
        most = request.length_tokens - 1
        return most if self._keeps_prefixes else min(most, request.loaded_to_tokens)

    def share(self, request: SimRequest, tokens: int) -> None:
        """Move the whole pages of a request's first ``tokens`` tokens to the prefix cache."""
        length = self.whole_pages_of(tokens)
        locked = request.locked_tokens
        if self._keeps_prefixes and length > locked and request.lock is not None:
            request.lock = self.cache.extend(request.lock, request.tokens, length)
            self.free((length - locked) // self.page_tokens)

    def release(self, request: SimRequest) -> None:
        """Release a request's KV: private pages become free, shared ones evictable."""
        locked_pages = request.locked_tokens // self.page_tokens
        self.free(self.pages_of(request.computed_tokens) - locked_pages)
        if request.lock is not None:
            lease_s = self.online_lease_s if request.info.is_online else 0.0
            self.cache.unlock(request.lock, self.now_s + lease_s)
        request.lock = None
        request.computed_tokens = 0
        request.shared_tokens = 0

    def note_sharing(self, admitted: Iterable[SimRequest]) -> None:
        """Let the views of requests say how much they share, where that has changed."""
        if self._sharing_version == self.cache.sharing_version:
            return
        self._sharing_version = self.cache.sharing_version
        for request in admitted:
            shared = 0 if request.lock is None else self.cache.shared_tokens(request.lock)
            if shared != request.shared_tokens:
                request.shared_tokens = shared
                request.refresh_view()
