"""Weights that are exchanged while the server runs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["WeightUpdates"]


class WeightUpdates:
    """Names the weights that are loaded, and says while they are being exchanged."""

    def __init__(self) -> None:
        self._run = secrets.token_hex(8)
        self._count = 0
        self._num_pending = 0
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def name(self) -> str:
        """Empty for the weights of the start; no other server's updated weights have its name."""
        return f"{self._run}/{self._count}" if self._count else ""

    @contextmanager
    def updating(self, *, disturbs: bool) -> Generator[None]:
        """Exchange the weights within it, whether or not it succeeds.

        ``disturbs`` says that requests in flight are aborted, or go on with the new weights.
        If not, SGLang waits for their end, and begins no others meanwhile.
        """
        self._num_pending += 1
        self._settled.clear()
        if disturbs:
            self._count += 1
        try:
            yield
        finally:
            # A failed update may have exchanged some of them.
            self._count += 1
            self._num_pending -= 1
            if not self._num_pending:
                self._settled.set()

    async def settled(self) -> None:
        """Wait while an exchange is under way."""
        await self._settled.wait()
