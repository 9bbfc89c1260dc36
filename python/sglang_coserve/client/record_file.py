"""One append-only file of records that survives being cut off at any byte."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from sglang_coserve.client.batch_result import RECORD_START, record_identity
from sglang_coserve.errors import InputFileError

__all__ = ["RecordFile"]


class RecordFile:
    """Records, one a line, each in the file as a whole or not at all.

    A record counts once its line ending is there. What follows the last line
    ending is what a killed run left unfinished; ``drop_torn_tail`` removes it.
    The file is made by the first ``open``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._size_bytes = 0
        self._is_synced = True

    def open(self) -> None:
        """Open the file for appending, making it when it is not there.

        Raises:
            InputFileError: it cannot be written, or is not a regular file.
        """
        if self.path.exists() and not self.path.is_file():
            raise InputFileError(f"{self.path} is not a regular file: choose another output")
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise InputFileError(f"cannot write {self.path}: {error.strerror}") from error

    def lock(self) -> None:
        """Keep every other process from locking the file until it is closed.

        Raises:
            InputFileError: another process holds the lock.
        """
        assert self._fd is not None, "lock() before open()"
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputFileError(
                f"{self.path} is being written by another client:"
                " wait for it to end, or choose another output"
            ) from error
        except OSError as error:
            raise InputFileError(f"cannot lock {self.path}: {error.strerror}") from error

    def scan(self) -> Iterator[tuple[int, int]]:
        """Yield (line number, digest) of every whole record. Changes nothing.

        Raises:
            InputFileError: the file holds something that no batch run wrote.
        """
        self._size_bytes = 0
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, record in enumerate(file, 1):
                identity = record_identity(record)
                if identity is None:
                    # A power failure can leave zeros where the tail was not yet on disk.
                    torn = record.rstrip(b"\0")
                    if not torn.endswith(b"\n") and RECORD_START.startswith(
                        torn[: len(RECORD_START)]
                    ):
                        return
                    raise InputFileError(
                        f"line {number} of {self.path} is not a batch result:"
                        " choose another output, or move this file away"
                    )
                self._size_bytes += len(record)
                yield identity

    def drop_torn_tail(self) -> None:
        """Cut the file after the last record that ``scan`` yielded."""
        self._truncate(self._size_bytes)

    def clear(self) -> None:
        """Forget every record."""
        self._truncate(0)

    def append(self, record: bytes) -> None:
        """Write one record, making the file when it is not there.

        Raises:
            InputFileError: the disk is full or failing; no part of the record stays.
        """
        if self._fd is None:
            self.open()
        assert self._fd is not None
        self._is_synced = False
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            os.ftruncate(self._fd, self._size_bytes)
            raise InputFileError(f"cannot write {self.path}: {error.strerror}") from error
        self._size_bytes += len(record)

    def sync(self) -> None:
        """Force what was written to the disk.

        Raises:
            InputFileError: the disk is full or failing.
        """
        if self._fd is None or self._is_synced:
            return
        self._is_synced = True
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise InputFileError(f"cannot write {self.path}: {error.strerror}") from error

    def close(self) -> None:
        """Force the file to the disk and release its lock."""
        if self._fd is not None:
            try:
                self.sync()
            finally:
                os.close(self._fd)
                self._fd = None

    def _truncate(self, size_bytes: int) -> None:
        if self._fd is None:
            if not self.path.exists():
                return
            self.open()
        assert self._fd is not None
        os.ftruncate(self._fd, size_bytes)
        self._size_bytes = size_bytes
        self._is_synced = False
