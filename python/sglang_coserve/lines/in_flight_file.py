"""Records the lines in the engine on disk, so that the next start knows them after a crash."""

from __future__ import annotations

import os
import secrets
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sglang_coserve.errors import StorageError

__all__ = ["InFlightFile", "LastRun"]

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
    machine, for which no line is to blame. They go to the page cache, a few
    microseconds each, so they are made on the event loop.
    """

    def __init__(self, path: Path, trace_path: Path) -> None:
        self._path = path
        self.trace_path = trace_path
        """Written when the process dies of a signal such as SIGSEGV, by ``faulthandler``."""

        self._fd: int | None = None
        self._free: list[int] = []
        self._num_entries = 0

    def last_run(self) -> LastRun | None:
        """Return the state of the last run; None if there was none. Blocks.

        Raises:
            StorageError: it cannot be read.
        """
        try:
            content = self._path.read_bytes() if self._path.exists() else b""
            is_there = self.trace_path.exists()
            trace = self.trace_path.read_text(errors="replace") if is_there else ""
        except OSError as error:
            raise self._failed(error) from error
        if len(content) < _HEAD.size or not content.startswith(_MAGIC):
            return None
        _, run_id, has_died = _HEAD.unpack_from(content)
        # Ignore a last entry that was torn by a crash of the machine.
        end = len(content) - (len(content) - _HEAD.size) % _ENTRY.size
        entries = _ENTRY.iter_unpack(content[_HEAD.size : end])
        lines = tuple((_PREFIX + batch.hex(), line) for batch, line in entries if line)
        return LastRun(run_id.hex(), bool(has_died or trace), lines, trace)

    def start(self) -> None:
        """Begin a run with no line in the engine, and discard the state of the last one. Blocks.

        Raises:
            StorageError: the disk is full or failing.
        """
        try:
            # The trace first: without it the old state is not counted as a crash.
            self.trace_path.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
            os.pwrite(self._fd, _HEAD.pack(_MAGIC, secrets.token_bytes(12), 0), 0)
        except OSError as error:
            raise self._failed(error) from error

    def begin(self, batch_id: str, line: int) -> int:
        """Record that the engine is about to get a line; return the entry for ``end``.

        Raises:
            StorageError: the disk is full or failing; the line must not reach the engine.
        """
        assert self._fd is not None
        entry = self._free.pop() if self._free else self._num_entries
        batch = bytes.fromhex(batch_id.removeprefix(_PREFIX))
        try:
            os.pwrite(self._fd, _ENTRY.pack(batch, line), _offset(entry))
        except OSError as error:
            if entry < self._num_entries:
                self._free.append(entry)
            raise self._failed(error) from error
        self._num_entries = max(self._num_entries, entry + 1)
        return entry

    def end(self, entry: int) -> None:
        """Record that a line is no longer in the engine."""
        if self._fd is None:
            return
        self._free.append(entry)
        # If this fails, the line may wrongly become a suspect, and is then just served again.
        with suppress(OSError):
            os.pwrite(self._fd, bytes(_ENTRY.size), _offset(entry))

    def note_death(self) -> None:
        """Record that the engine has crashed. Fast, and never raises."""
        if self._fd is not None:
            with suppress(OSError):
                os.pwrite(self._fd, (1).to_bytes(4, "little"), _HEAD.size - 4)

    def close(self) -> None:
        """Close the file at the end of the run."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(f"{self._path} cannot be used: {error.strerror}")


def _offset(entry: int) -> int:
    return _HEAD.size + entry * _ENTRY.size
