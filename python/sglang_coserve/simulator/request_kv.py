"""The KV of requests: pages of their own, and pages that they share in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.kv_pool import KvPool
from sglang_coserve.simulator.prefix_cache import SimulatedPrefixCache
from sglang_coserve.simulator.request import SimRequest

__all__ = ["RequestKv"]


class RequestKv:
    """Moves the KV of requests between the pool and the prefix cache."""

    def __init__(self, config: ExecutorConfig) -> None:
        self.cache = SimulatedPrefixCache(config.page_tokens)
        self.pool = KvPool(config.kv_capacity_tokens, self.cache, config.page_tokens)
        self._keeps_prefixes = config.prefix_cache
        self._sharing_version = 0

    def cached_tokens(self, request: SimRequest) -> int:
        """Return how many leading tokens of a waiting request need not be computed."""
        # The last token is always computed, because its logits are needed.
        limit = request.length_tokens - 1
        page_tokens = self.pool.page_tokens
        saved = min(request.saved_tokens, limit // page_tokens * page_tokens)
        if not self._keeps_prefixes:
            return saved
        return max(saved, self.cache.match(request.tokens, limit))

    def admit(self, request: SimRequest) -> int:
        """Lock what is cached of a request; return how many more tokens are to be reloaded."""
        limit = request.length_tokens - 1 if self._keeps_prefixes else 0
        request.lock = self.cache.lock(request.tokens, limit) if limit else self.cache.root
        given = request.locked_tokens
        reloaded = max(0, self.cached_tokens(request) - given)
        request.computed_tokens = given + reloaded
        request.given_tokens += given
        request.reloaded_tokens += reloaded
        return reloaded

    def share(self, request: SimRequest, tokens: int) -> None:
        """Move the whole pages of a request's first ``tokens`` tokens to the prefix cache."""
        page_tokens = self.pool.page_tokens
        length = tokens // page_tokens * page_tokens
        locked = request.locked_tokens
        if self._keeps_prefixes and length > locked and request.lock is not None:
            request.lock, _ = self.cache.extend(request.lock, request.tokens, length)
            self.pool.release((length - locked) // page_tokens)

    def release(self, request: SimRequest) -> None:
        """Release a request's KV: private pages become free, shared ones evictable."""
        locked_pages = request.locked_tokens // self.pool.page_tokens
        self.pool.release(self.pool.pages_of(request.computed_tokens) - locked_pages)
        if request.lock is not None:
            self.cache.unlock(request.lock)
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
