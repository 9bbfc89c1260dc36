"""A bound on the bytes that many tasks hold together."""

from __future__ import annotations

import asyncio

__all__ = ["ByteBudget"]


class ByteBudget:
    """Counts bytes in use; one task at a time may wait for more of them."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._released = asyncio.Event()

    async def acquire(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` fit; more than the limit fits alone."""
        while self._used_bytes and self._used_bytes + size_bytes > self._limit_bytes:
            self._released.clear()
            await self._released.wait()
        self._used_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Give back what ``acquire`` took."""
        self._used_bytes -= size_bytes
        self._released.set()
