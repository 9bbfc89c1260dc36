"""Host memory for KV, granted to each class within its quota."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sglang_coserve.core.kv_checkpoint import Backoff, HostQuota
from sglang_coserve.core.request import RequestClass

__all__ = ["HostSpace"]

Slots = Any
"""A tensor of host slots, one a token."""


class HostSpace:
    """Allocates and frees host slots; knows what each class holds, to the token."""

    def __init__(self, pool: Any, quota: HostQuota, counts: Counter[str]) -> None:
        self._pool = pool
        self._quota = quota
        self._used_tokens: Counter[RequestClass] = Counter()
        self._backoff = {request_class: Backoff() for request_class in RequestClass}
        self._counts = counts

    def used_tokens(self, request_class: RequestClass) -> int:
        """Return what a class holds."""
        return self._used_tokens[request_class]

    def limit_tokens(self, request_class: RequestClass) -> int:
        """Return what a class may hold."""
        return self._quota.limit(request_class)

    def free_tokens(self, request_class: RequestClass) -> int:
        """Return what a class would be granted at once."""
        left = self.limit_tokens(request_class) - self._used_tokens[request_class]
        return min(left, int(self._pool.available_size()))

    def may_try(self, request_class: RequestClass, step: int) -> bool:
        """Return whether a class may hold anything, and was not refused a moment ago."""
        may_hold = self._quota.limit(request_class) > 0
        return may_hold and self._backoff[request_class].may_try(step)

    def shortage(self, request_class: RequestClass, tokens: int) -> int | None:
        """Return what a class must give up before ``tokens`` can be granted; None: never."""
        return self._quota.shortage(request_class, self._used_tokens[request_class], tokens)

    def alloc(self, request_class: RequestClass, tokens: int, step: int) -> Slots | None:
        """Return slots, or None beyond the quota or when the pool is full; ask again later then."""
        slots = None
        if self.shortage(request_class, tokens) == 0:
            slots = self._pool.alloc(tokens)
        backoff = self._backoff[request_class]
        if slots is None:
            self._counts["allocation_failures"] += 1
            self._backoff[request_class] = backoff.failed(step)
            return None
        self._backoff[request_class] = backoff.succeeded()
        self._used_tokens[request_class] += tokens
        return slots

    def free(self, request_class: RequestClass, slots: Slots) -> None:
        """Give slots of a class back; no copy to or from them may be under way."""
        self._pool.free(slots)
        self._used_tokens[request_class] -= len(slots)
        assert self._used_tokens[request_class] >= 0

    def assert_consistent(self) -> None:
        """Check that the pool and the classes agree on what is taken."""
        taken = self._pool.logical_size - self._pool.available_size()
        assert taken == sum(self._used_tokens.values())
