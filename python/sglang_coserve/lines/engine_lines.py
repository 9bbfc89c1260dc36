"""Tracks the lines in the engine, and sends those alone that may have crashed it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from types import MappingProxyType
from typing import Final

from sglang_coserve.lines.in_flight_file import InFlightFile

__all__ = ["MAX_DEATHS", "EngineLines", "LineTurns"]

_TURN_S: Final = 60.0
"""Duration of a turn while lines of the other kind wait. Short compared with completion windows of
hours; long compared with the wait for lines in flight at the beginning of a turn."""


class LineTurns:
    """Serves suspects one at a time and without other lines, across all jobs.

    So if the engine crashes again, it is known which line did it, and no other becomes a suspect.
    As long as there are suspects, they and the other lines take turns, suspects first:
    a server that crashes soon after every start resolves at least one of them each time.
    """

    def __init__(self, monotonic_s: Callable[[], float], turn_s: float = _TURN_S) -> None:
        self._monotonic_s = monotonic_s
        self._turn_s = turn_s
        self._is_suspects_turn = True
        self._turn_ends_s = 0.0
        self._num_runs = 0
        self._num_beside = 0
        self._num_waiting_beside = 0
        self._num_waiting_alone = 0
        self._has_suspect = False
        self._changed = asyncio.Event()

    @property
    def suspects_in_flight(self) -> int:
        """1 while a suspect is being served, else 0."""
        return int(self._has_suspect)

    @contextmanager
    def suspects(self) -> Generator[None]:
        """Announce, in this context, that there are suspects to serve."""
        if not self._num_runs:
            self._begin_turn(is_suspects=True)
        self._num_runs += 1
        try:
            yield
        finally:
            self._num_runs -= 1
            self._wake_all()

    @asynccontextmanager
    async def beside(self) -> AsyncGenerator[None]:
        """Wait until ordinary lines may run; an ordinary line is served in this context."""
        self._num_waiting_beside += 1
        try:
            while not self._may_begin_mixed():
                await self._changed.wait()
        finally:
            self._num_waiting_beside -= 1
            self._wake_all()
        self._num_beside += 1
        try:
            yield
        finally:
            self._num_beside -= 1
            self._wake_all()

    @asynccontextmanager
    async def alone(self) -> AsyncGenerator[None]:
        """Wait until no other line is being served; a suspect is served in this context."""
        self._num_waiting_alone += 1
        try:
            while not self._may_begin_offline():
                await self._changed.wait()
        finally:
            self._num_waiting_alone -= 1
            self._wake_all()
        self._has_suspect = True
        try:
            yield
        finally:
            self._has_suspect = False
            self._wake_all()

    def _may_begin_mixed(self) -> bool:
        if self._has_suspect:
            return False
        if not self._num_runs:
            return True
        if self._is_suspects_turn and self._is_turn_over:
            self._begin_turn(is_suspects=False)
        if self._is_suspects_turn:
            return False
        return not (self._is_turn_over and self._num_waiting_alone)

    def _may_begin_offline(self) -> bool:
        if self._has_suspect or self._num_beside:
            return False
        is_over, others_wait = self._is_turn_over, self._num_waiting_beside > 0
        if self._is_suspects_turn:
            if is_over and others_wait:
                self._begin_turn(is_suspects=False)
                return False
        elif is_over or not others_wait:
            self._begin_turn(is_suspects=True)
        return self._is_suspects_turn

    @property
    def _is_turn_over(self) -> bool:
        return self._monotonic_s() >= self._turn_ends_s

    def _begin_turn(self, *, is_suspects: bool) -> None:
        self._is_suspects_turn = is_suspects
        self._turn_ends_s = self._monotonic_s() + self._turn_s
        self._wake_all()

    def _wake_all(self) -> None:
        """Make all waiters check their condition again."""
        if self._num_waiting_beside or self._num_waiting_alone:
            self._changed.set()
            self._changed = asyncio.Event()


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
