"""Bounds uploads and downloads: how many run at a time, and how fast beside online requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from sglang_coserve.batch.errors import TooManyError
from sglang_coserve.lines.backend import Backend
from sglang_coserve.lines.clock import Clock

__all__ = ["Transfers", "UploadPace"]


class Transfers:
    """The places of transfers. An owner may take as many as are still free."""

    def __init__(self, kind: str, most: int) -> None:
        self._kind = kind
        self._most = most
        self._by_owner: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Transfers under way."""
        return self._by_owner.total()

    @contextmanager
    def one(self, owner: str) -> Generator[None]:
        """Enter for as long as a transfer of ``owner`` takes.

        Raises:
            TooManyError: there are too many, of this owner or of all.
        """
        count, free = self._by_owner[owner], self._most - self.count
        if count >= free:
            raise TooManyError(
                f"{count} {self._kind} of this key are under way, and {free} more could be of all "
                f"keys: wait until one is done",
                code=f"too_many_{self._kind}",
            )
        self._by_owner[owner] += 1
        try:
            yield
        finally:
            self._by_owner[owner] -= 1
            self._by_owner += Counter()  # Owners without transfers are removed.


class UploadPace:
    """Holds all uploads together to ``busy_bytes_per_s`` while online requests are served.

    Each piece of an upload takes time of the event loop and the interpreter lock that
    online requests are read, tokenized and answered with. What is not read waits in
    the client, by TCP's flow control.
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
