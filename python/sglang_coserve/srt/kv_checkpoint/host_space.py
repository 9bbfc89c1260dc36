"""Allocates host memory for KV."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sglang_coserve.core.kv_checkpoint import Backoff

__all__ = ["HostSpace"]

Slots = Any
"""A tensor of host slots, one per token."""


class HostSpace:
    """Allocates and frees host slots, up to a limit that is at most what the pool has."""

    def __init__(self, pool: Any, limit_tokens: int, counts: Counter[str]) -> None:
        self.limit_tokens = limit_tokens
        """The most tokens that may be held."""

        self._pool = pool
        self._backoff = Backoff()
        self._counts = counts

    @property
    def used_tokens(self) -> int:
        """The tokens that are held."""
        return int(self._pool.logical_size - self._pool.available_size())

    @property
    def free_tokens(self) -> int:
        """The tokens that can be allocated without reclaiming any."""
        return self.limit_tokens - self.used_tokens

    def may_try(self, step: int) -> bool:
        """Return whether this is no back-off after a refusal."""
        return self._backoff.may_try(step)

    def shortage(self, tokens: int) -> int | None:
        """Return the tokens to free before ``tokens`` can be allocated; None if these exceed the
        limit."""
        if tokens > self.limit_tokens:
            return None
        return max(0, self.used_tokens + tokens - self.limit_tokens)

    def alloc(self, tokens: int, step: int) -> Slots | None:
        """Allocate slots; return None, and back off, if the limit or the pool is exhausted."""
        slots = self._pool.alloc(tokens) if self.shortage(tokens) == 0 else None
        if slots is None:
            self._counts["allocation_failures"] += 1
            self._backoff = self._backoff.failed(step)
            return None
        self._backoff = self._backoff.succeeded()
        return slots

    def free(self, slots: Slots) -> None:
        """Free slots; no copy to or from them may be in flight."""
        self._pool.free(slots)
