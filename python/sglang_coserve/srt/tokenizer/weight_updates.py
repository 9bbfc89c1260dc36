"""Tracks weights that are updated while the server runs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Generator
from contextlib import contextmanager

from sglang_coserve.lines.backend import ChangeListeners

__all__ = ["WeightUpdates"]


class WeightUpdates:
    """Identifies the loaded weights, and signals while they are being updated."""

    def __init__(self) -> None:
        self._run = secrets.token_hex(8)
        self._count = 0
        self._num_pending = 0
        self._is_paused = False
        self.cache_key = ""
        """Cache namespace for the prefixes of batch lines. Not empty once weights were updated
        without flushing the cache, which then holds KV of other weights."""

        self.listeners = ChangeListeners()
        """Told when an exchange is about to wait for the end of all requests in flight."""

        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def name(self) -> str:
        """Unique name of the current weights, across servers; empty for the initial weights."""
        return f"{self._run}/{self._count}" if self._count else ""

    @property
    def is_changing(self) -> bool:
        """True while weights are updated, or generation is paused for an update."""
        return not self._settled.is_set()

    async def settled(self) -> None:
        """Wait while ``is_changing``."""
        await self._settled.wait()

    @contextmanager
    def updating(self, *, empties_cache: bool) -> Generator[None]:
        """Mark the weights as being updated in this context, whether or not that succeeds.

        No request is served meanwhile. Those in flight have ended before, were aborted,
        or are paused and continue with the new weights.
        """
        self._num_pending += 1
        try:
            self._settled.clear()
            if not self._is_paused:
                self.listeners.tell()
            yield
        finally:
            # A failed update may have changed some of the weights.
            self._count += 1
            self.cache_key = "" if empties_cache else self.name
            self._num_pending -= 1
            self._settle()

    def pause(self) -> None:
        """Record that generation was paused."""
        self._is_paused = True
        self._settled.clear()

    def resume(self) -> None:
        """Record that generation was resumed."""
        self._is_paused = False
        self._settle()

    def _settle(self) -> None:
        if not self._num_pending and not self._is_paused:
            self._settled.set()
