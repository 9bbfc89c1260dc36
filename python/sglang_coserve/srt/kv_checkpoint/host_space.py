"""Allocates host memory for KV to each class within its quota."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sglang_coserve.core.kv_checkpoint import Backoff, HostQuota
from sglang_coserve.core.request import RequestClass

__all__ = ["HostSpace"]

Slots = Any
"""A tensor of host slots, one per token."""


class HostSpace:
    """Allocates and frees host slots, and counts those of each class."""

    def __init__(self, pool: Any, quota: HostQuota, counts: Counter[str]) -> None:
        self._pool = pool
        self._quota = quota
        self._used_tokens: Counter[RequestClass] = Counter()
        self._backoff = {request_class: Backoff() for request_class in RequestClass}
        self._counts = counts

    def used_tokens(self, request_class: RequestClass) -> int:
        """Return the number of tokens that a class holds."""
        return self._used_tokens[request_class]

    def limit_tokens(self, request_class: RequestClass) -> int:
        """Return the most tokens that a class may hold."""
        return self._quota.limit(request_class)

    def free_tokens(self, request_class: RequestClass) -> int:
        """Return the tokens that a class can allocate without reclaiming any."""
        left = self.limit_tokens(request_class) - self._used_tokens[request_class]
        return min(left, int(self._pool.available_size()))

    def may_try(self, request_class: RequestClass, step: int) -> bool:
        """Return whether a class has a quota, and is not backing off after a refusal."""
        may_hold = self._quota.limit(request_class) > 0
        return may_hold and self._backoff[request_class].may_try(step)

    def shortage(self, request_class: RequestClass, tokens: int) -> int | None:
        """Return the tokens that a class must free before it can allocate ``tokens``; None if
        these exceed its quota."""
        return self._quota.shortage(request_class, self._used_tokens[request_class], tokens)

    def alloc(self, request_class: RequestClass, tokens: int, step: int) -> Slots | None:
        """Allocate slots; return None, and back off, if the quota or the pool is exhausted."""
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
        """Free slots of a class; no copy to or from them may be in flight."""
        self._pool.free(slots)
        self._used_tokens[request_class] -= len(slots)
        assert self._used_tokens[request_class] >= 0

    def assert_consistent(self) -> None:
        """Assert that the pool and the classes agree on the number of used slots."""
        taken = self._pool.logical_size - self._pool.available_size()
        assert taken == sum(self._used_tokens.values())
