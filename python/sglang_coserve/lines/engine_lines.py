"""The lines that the engine has, and those that it may have died of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from types import MappingProxyType
from typing import Final

from sglang_coserve.lines.in_flight_file import InFlightFile
from sglang_coserve.lines.line_turns import LineTurns

__all__ = ["MAX_DEATHS", "EngineLines"]

MAX_DEATHS: Final = 2
"""How often the engine may die of a line before that is given up."""


class EngineLines:
    """Notes every line before the engine gets it, and keeps suspects apart.

    A suspect is a line that the engine had when it ended by itself. To stop or kill the
    server, or to lose power, makes no line a suspect.
    """

    def __init__(
        self,
        file: InFlightFile | None = None,
        suspects: Mapping[str, Mapping[int, int]] = MappingProxyType({}),
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a ``file`` nothing is noted: of an engine elsewhere, whose deaths say little."""
        self._file = file
        self._suspects = suspects
        self._turns = LineTurns(monotonic_s)
        self._limits: set[asyncio.Timeout] = set()

    def suspects_of(self, batch_id: str) -> Mapping[int, int]:
        """Return how often the engine has died of each line of a batch that is suspected."""
        return self._suspects.get(batch_id, {})

    @property
    def suspects_in_flight(self) -> int:
        """1 while a suspect is being served, else 0."""
        return self._turns.suspects_in_flight

    def serving_suspects(self) -> AbstractContextManager[None]:
        """Within it suspects are served, one after the other; the other lines take turns."""
        return self._turns.suspects()

    def take_out(self) -> None:
        """End all that is being served, as if its time were up."""
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)

    @asynccontextmanager
    async def in_engine(self, batch_id: str, line: int) -> AsyncGenerator[asyncio.Timeout]:
        """Have the engine serve a line within it, and within the limit that it yields.

        Waits for its turn.

        Raises:
            StorageError: it cannot be noted, so it must not reach the engine.
        """
        is_suspect = line in self.suspects_of(batch_id)
        async with self._turns.alone() if is_suspect else self._turns.beside():
            entry = self._file.begin(batch_id, line) if self._file else 0
            limit = asyncio.timeout(None)
            self._limits.add(limit)
            try:
                yield limit
            finally:
                self._limits.discard(limit)
                if self._file:
                    self._file.end(entry)

    def note_death(self) -> None:
        """Note that the engine has ended by itself. Quick, and never raises."""
        if self._file:
            self._file.note_death()

    def close(self) -> None:
        """End the run."""
        if self._file:
            self._file.close()
