"""Which lines the engine has, on the disk, for the next start to read if the engine dies of one."""

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
"""Magic, id of the run, 1 once the engine has died."""

_ENTRY: Final = struct.Struct("<12sI")
"""Batch and line; the line is 0 where no line is."""

_PREFIX: Final = "batch_"


@dataclass(frozen=True, slots=True)
class LastRun:
    """What the run of the server before this one has left."""

    id: str
    """Different for every run, so that its end is counted once."""

    engine_died: bool
    """The engine ended by itself: nobody stopped or killed the server."""

    lines: tuple[tuple[str, int], ...]
    """(batch, line) of what the engine had."""

    trace: str = ""
    """Where the process was when it died of a signal such as SIGSEGV."""


class InFlightFile:
    """A table of the lines in the engine, one small write for each beginning and end.

    The writes are not forced to the disk: they outlive the processes, not the machine,
    whose end is no fault of a line. They go to a page that is in memory already, a few
    microseconds each, so they are made where they are needed and never wait for a thread.
    """

    def __init__(self, path: Path, trace_path: Path) -> None:
        self._path = path
        self.trace_path = trace_path
        """Written when the process dies of a signal such as SIGSEGV, by ``faulthandler``."""

        self._fd: int | None = None
        self._free: list[int] = []
        self._num_entries = 0

    def last_run(self) -> LastRun | None:
        """Return what the last run has left; None when there was none. Blocks.

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
        # An entry that a crash of the machine has torn is none.
        end = len(content) - (len(content) - _HEAD.size) % _ENTRY.size
        entries = _ENTRY.iter_unpack(content[_HEAD.size : end])
        lines = tuple((_PREFIX + batch.hex(), line) for batch, line in entries if line)
        return LastRun(run_id.hex(), bool(has_died or trace), lines, trace)

    def start(self) -> None:
        """Begin a run with no line in the engine; what the last one left is gone. Blocks.

        Raises:
            StorageError: the disk is full or failing.
        """
        try:
            # The trace first: without it, what is left is of a run that nobody counts.
            self.trace_path.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
            os.pwrite(self._fd, _HEAD.pack(_MAGIC, secrets.token_bytes(12), 0), 0)
        except OSError as error:
            raise self._failed(error) from error

    def begin(self, batch_id: str, line: int) -> int:
        """Note that the engine is about to get a line; return what ``end`` needs.

        Raises:
            StorageError: the disk is full or failing: the line must not reach the engine.
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
        """Note that the engine has the line no more."""
        if self._fd is None:
            return
        self._free.append(entry)
        # Should this fail, the line may be suspected of what it did not do: it is served again.
        with suppress(OSError):
            os.pwrite(self._fd, bytes(_ENTRY.size), _offset(entry))

    def note_death(self) -> None:
        """Note that the engine has ended by itself. Quick, and never raises."""
        if self._fd is not None:
            with suppress(OSError):
                os.pwrite(self._fd, (1).to_bytes(4, "little"), _HEAD.size - 4)

    def close(self) -> None:
        """End the run: nothing is in the engine."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(f"{self._path} cannot be used: {error.strerror}")


def _offset(entry: int) -> int:
    return _HEAD.size + entry * _ENTRY.size
