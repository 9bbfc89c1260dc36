"""Tracks the lines in the engine, and isolates those that may have crashed it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from types import MappingProxyType
from typing import Final

from sglang_coserve.lines.in_flight_file import InFlightFile
from sglang_coserve.lines.line_turns import LineTurns

__all__ = ["MAX_DEATHS", "EngineLines"]

MAX_DEATHS: Final = 2
"""Number of crashes after which a line is given up."""


class EngineLines:
    """Records every line before the engine gets it, and serves suspects alone.

    A suspect is a line that was in the engine when it crashed. Stopping or killing the
    server, or a power failure, makes no line a suspect.
    """

    def __init__(
        self,
        file: InFlightFile | None = None,
        suspects: Mapping[str, Mapping[int, int]] = MappingProxyType({}),
    ) -> None:
        """Without a ``file``, for a remote engine, nothing is recorded."""
        self._file = file
        self._suspects = suspects
        self._turns = LineTurns(time.monotonic)
        self._limits: set[asyncio.Timeout] = set()

    def suspects_of(self, batch_id: str) -> Mapping[int, int]:
        """Return the suspects of a batch: the number of crashes by line number."""
        return self._suspects.get(batch_id, {})

    @property
    def suspects_in_flight(self) -> int:
        """1 while a suspect is being served, else 0."""
        return self._turns.suspects_in_flight

    def serving_suspects(self) -> AbstractContextManager[None]:
        """Return a context in which suspects are served one at a time, in turns with others."""
        return self._turns.suspects()

    def take_out(self) -> None:
        """End the attempts at all lines in the engine now; see ``in_engine``."""
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)

    @asynccontextmanager
    async def in_engine(self, batch_id: str, line: int) -> AsyncGenerator[asyncio.Timeout]:
        """Wait for a line's turn, and record it as in the engine within this context.

        Yields a timeout. Once ``take_out`` was called it has expired: what runs in the context is
        cancelled, and the context ends without an error.

        Raises:
            StorageError: the line cannot be recorded, so it must not reach the engine.
        """
        is_suspect = line in self.suspects_of(batch_id)
        async with self._turns.alone() if is_suspect else self._turns.beside():
            entry = self._file.begin(batch_id, line) if self._file else 0
            limit = asyncio.timeout(None)
            try:
                async with limit:
                    self._limits.add(limit)
                    try:
                        yield limit
                    finally:
                        self._limits.discard(limit)
            except TimeoutError:
                if not limit.expired():
                    raise
            finally:
                if self._file:
                    self._file.end(entry)

    def note_death(self) -> None:
        """Record that the engine has crashed. Fast, and never raises."""
        if self._file:
            self._file.note_death()

    def close(self) -> None:
        """End the run."""
        if self._file:
            self._file.close()
