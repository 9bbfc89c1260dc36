"""Slows uploads down while online requests are served."""

from __future__ import annotations

import asyncio

from sglang_coserve.lines.backend import Backend
from sglang_coserve.lines.clock import Clock

__all__ = ["UploadPace"]


class UploadPace:
    """Holds all uploads together to ``busy_bytes_per_s`` while online requests are served.

    Each piece of an upload takes time of the event loop and the interpreter lock that
    online requests are read, tokenized and answered with. What is not read waits in
    the client: TCP tells it to.
    """

    def __init__(self, backend: Backend, clock: Clock, busy_bytes_per_s: float) -> None:
        self._backend = backend
        self._clock = clock
        self._busy_bytes_per_s = busy_bytes_per_s
        self._turn = asyncio.Lock()

    async def taken(self, size_bytes: int) -> None:
        """Wait until an upload that has just received ``size_bytes`` may continue."""
        async with self._turn:
            if self._backend.load().is_online_busy:
                await self._clock.sleep(size_bytes / self._busy_bytes_per_s)
