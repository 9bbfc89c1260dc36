"""Weights that are exchanged while the server runs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["WeightUpdates"]


class WeightUpdates:
    """Names the weights that are loaded, and says while they are being exchanged."""

    def __init__(self) -> None:
        self._run = secrets.token_hex(8)
        self._count = 0
        self._num_pending = 0
        self._is_paused = False
        self.cache_key = ""
        """What lines find their cached prefixes under. Not empty once weights were exchanged
        without emptying the cache, which then holds other weights' values."""

        self.on_update: list[Callable[[], None]] = []
        """Called when an exchange is about to wait for the end of all requests in flight."""

        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def name(self) -> str:
        """Empty for the weights of the start; no other server's updated weights have its name."""
        return f"{self._run}/{self._count}" if self._count else ""

    @property
    def is_changing(self) -> bool:
        """True while they are exchanged, or generation is paused so that they can be."""
        return not self._settled.is_set()

    async def settled(self) -> None:
        """Wait while ``is_changing``."""
        await self._settled.wait()

    @contextmanager
    def updating(self, *, empties_cache: bool) -> Generator[None]:
        """Exchange the weights within it, whether or not it succeeds.

        No request is answered meanwhile. Those in flight have ended before, been aborted,
        or are paused and go on with the new weights.
        """
        self._num_pending += 1
        self._settled.clear()
        if not self._is_paused:
            for take_out in self.on_update:
                take_out()
        try:
            yield
        finally:
            # A failed update may have exchanged some of them.
            self._count += 1
            self.cache_key = "" if empties_cache else self.name
            self._num_pending -= 1
            self._settle()

    def pause(self) -> None:
        """Generation pauses."""
        self._is_paused = True
        self._settled.clear()

    def resume(self) -> None:
        """Generation goes on."""
        self._is_paused = False
        self._settle()

    def _settle(self) -> None:
        if not self._num_pending and not self._is_paused:
            self._settled.set()
