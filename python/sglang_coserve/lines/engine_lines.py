"""Tracks the lines in the engine, and sends those alone that may have crashed it."""

from __future__ import annotations

import asyncio
import os
import secrets
import struct
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from sglang_coserve.errors import disk_errors
from sglang_coserve.lines.fair_slots import JobShare

TURN_S: Final = 60.0
"""Duration of a turn while lines of the other kind wait. Short compared with completion windows of
hours; long compared with the wait for lines in flight at the beginning of a turn."""


class LineTurns:
    """Serves suspects one at a time and without other lines, across all jobs.

    So if the engine crashes again, it is known which line did it, and no other becomes a suspect.
    As long as there are suspects, they and the other lines take turns, suspects first:
    a server that crashes soon after every start resolves at least one of them each time.
    """

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._is_suspects_turn = True
        self._turn_ends_s = 0.0
        self._num_runs = 0
        self._running: Counter[bool] = Counter()
        self._waiting: Counter[bool] = Counter()
        """Lines by whether they are suspects."""

        self._changed = asyncio.Event()

    @property
    def suspects_in_flight(self) -> int:
        """1 while a suspect is being served, else 0."""
        return self._running[True]

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
    async def one(self, *, is_suspect: bool) -> AsyncGenerator[None]:
        """Wait until a line may run; it is served in this context."""
        self._waiting[is_suspect] += 1
        try:
            while not self._may_begin(is_suspect):
                await self._changed.wait()
        finally:
            self._waiting[is_suspect] -= 1
            self._wake_all()
        self._running[is_suspect] += 1
        try:
            yield
        finally:
            self._running[is_suspect] -= 1
            self._wake_all()

    def _may_begin(self, is_suspect: bool) -> bool:
        if self._running[True] or (is_suspect and self._running[False]):
            return False
        if not is_suspect and not self._num_runs:
            return True
        is_over = self._monotonic_s() >= self._turn_ends_s
        others_wait = self._waiting[not is_suspect] > 0
        if is_suspect is not self._is_suspects_turn:
            if is_over or (is_suspect and not others_wait):
                self._begin_turn(is_suspects=is_suspect)
            return is_suspect is self._is_suspects_turn
        if not (is_over and others_wait):
            return True
        if is_suspect:  # The others' turn begins at once, that of suspects once they are alone.
            self._begin_turn(is_suspects=False)
        return False

    def _begin_turn(self, *, is_suspects: bool) -> None:
        self._is_suspects_turn = is_suspects
        self._turn_ends_s = self._monotonic_s() + TURN_S
        self._wake_all()

    def _wake_all(self) -> None:
        """Make all waiters check their condition again."""
        if self._waiting.total():
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
        self.turns = LineTurns(time.monotonic)
        """Of suspects, and of other lines."""

        self._limits: set[asyncio.Timeout] = set()

    def suspects_of(self, batch_id: str) -> Mapping[int, int]:
        """Return the suspects of a batch: the number of crashes by line number."""
        return self._suspects.get(batch_id, {})

    def take_out(self) -> None:
        """End the attempts at all lines in the engine now; see ``in_engine``."""
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)

    @asynccontextmanager
    async def in_engine(
        self, batch_id: str, line: int, share: JobShare
    ) -> AsyncGenerator[asyncio.Timeout]:
        """Wait for a line's turn, and record it as in the engine within this context.

        Yields a timeout. Once ``take_out`` was called it has expired: what runs in the context is
        cancelled, and the context ends without an error.

        Raises:
            StorageError: the line cannot be recorded, so it must not reach the engine.
        """
        async with AsyncExitStack() as turn:
            with share.waiting("suspect"):
                is_suspect = line in self.suspects_of(batch_id)
                await turn.enter_async_context(self.turns.one(is_suspect=is_suspect))
            entry = await self._file.begin(batch_id, line) if self._file else 0
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


_MAGIC: Final = b"coserve flight 1"
_HEAD: Final = struct.Struct("<16s12sI")
"""Magic, id of the run, 1 once the engine has crashed."""

_ENTRY: Final = struct.Struct("<12sI")
"""Batch and line; line 0 marks an unused entry."""

_PREFIX: Final = "batch_"


@dataclass(frozen=True, slots=True)
class LastRun:
    """The state that the previous run of the server has left."""

    id: str
    """Unique for each run, so that a crash is counted only once."""

    engine_died: bool
    """The engine crashed; the server was not stopped or killed."""

    lines: tuple[tuple[str, int], ...]
    """(batch, line) of the lines that were in the engine."""

    trace: str = ""
    """Traceback of the process if it died of a signal such as SIGSEGV."""


class InFlightFile:
    """A table of the lines in the engine, with one small write when a line begins or ends.

    The writes are not forced to disk: they survive a crash of the process but not of the
    machine, for which no line is to blame. They go to the page cache, mostly in a few
    microseconds, but some file systems have them wait for the disk: so a thread of its own makes
    them, in order. Methods raise ``StorageError`` when the disk is full or failing.
    """

    def __init__(self, path: Path, trace_path: Path) -> None:
        self._path = path
        self.trace_path = trace_path
        """Written when the process dies of a signal such as SIGSEGV, by ``faulthandler``."""

        self._fd: int | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._free: list[int] = []
        self._num_entries = 0

    def last_run(self) -> LastRun | None:
        """Return the state of the last run; None if there was none. Blocks."""
        with self._disk_errors():
            content = self._path.read_bytes() if self._path.exists() else b""
            is_there = self.trace_path.exists()
            trace = self.trace_path.read_text(errors="replace") if is_there else ""
        if len(content) < _HEAD.size or not content.startswith(_MAGIC):
            return None
        _, run_id, has_died = _HEAD.unpack_from(content)
        # Ignore a last entry that was torn by a crash of the machine.
        end = len(content) - (len(content) - _HEAD.size) % _ENTRY.size
        entries = _ENTRY.iter_unpack(content[_HEAD.size : end])
        lines = tuple((_PREFIX + batch.hex(), line) for batch, line in entries if line)
        return LastRun(run_id.hex(), bool(has_died or trace), lines, trace)

    def start(self) -> None:
        """Begin a run with no line in the engine, and discard the state of the last one. Blocks."""
        with self._disk_errors():
            # The trace first: without it the old state is not counted as a crash.
            self.trace_path.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
            os.pwrite(self._fd, _HEAD.pack(_MAGIC, secrets.token_bytes(12), 0), 0)
        self._writer = ThreadPoolExecutor(1, "coserve-in-flight")

    async def begin(self, batch_id: str, line: int) -> int:
        """Record that the engine is about to get a line; return the entry for ``end``.

        Raises:
            StorageError: the disk is full or failing; the line must not reach the engine.
        """
        assert self._fd is not None
        assert self._writer is not None
        if self._free:
            entry = self._free.pop()
        else:
            entry, self._num_entries = self._num_entries, self._num_entries + 1
        content = _ENTRY.pack(bytes.fromhex(batch_id.removeprefix(_PREFIX)), line)
        writing = self._writer.submit(os.pwrite, self._fd, content, _offset(entry))
        try:
            with self._disk_errors():
                await asyncio.wrap_future(writing)
        except BaseException:
            self.end(entry)  # A write that has begun is made, however this ends.
            raise
        return entry

    def end(self, entry: int) -> None:
        """Record soon that a line is no longer in the engine."""
        if self._fd is not None and self._writer is not None:
            self._writer.submit(self._clear, self._fd, entry)

    def _clear(self, fd: int, entry: int) -> None:
        # If this fails, the line may wrongly become a suspect, and is then just served again.
        with suppress(OSError):
            os.pwrite(fd, bytes(_ENTRY.size), _offset(entry))
        self._free.append(entry)

    def note_death(self) -> None:
        """Record that the engine has crashed. Fast, and never raises."""
        if self._fd is not None:
            with suppress(OSError):
                os.pwrite(self._fd, (1).to_bytes(4, "little"), _HEAD.size - 4)

    def close(self) -> None:
        """Close the file at the end of the run. Blocks until all is written."""
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _disk_errors(self) -> AbstractContextManager[None]:
        return disk_errors(f"{self._path} cannot be used")


def _offset(entry: int) -> int:
    return _HEAD.size + entry * _ENTRY.size
