"""The output and error file of one batch, which may be cut off anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sglang_coserve.batch.errors import StorageError
from sglang_coserve.batch.line_bitmap import LineBitmap
from sglang_coserve.batch.record import Progress, Usage
from sglang_coserve.batch.result_record import record_line, usage_in_record

__all__ = ["Recovered", "ResultLog"]

_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Recovered:
    """What the files of a batch hold."""

    finished: LineBitmap
    progress: Progress


class ResultLog:
    """Two append-only files of records, each of them in a file as a whole or not at all.

    A record counts once its line ending is there. Every call blocks.
    """

    def __init__(
        self, batch_id: str, output: Path, errors: Path, sync_names: Callable[[], None]
    ) -> None:
        self._batch_id = batch_id
        self._output = output
        self._errors = errors
        self._sync_names = sync_names
        self._sizes: dict[Path, int] = {}
        """Of both files, since ``recover``."""

    def recover(self, committed: Progress, mean_estimate_tokens: int) -> Recovered:
        """Cut off what a crash left unfinished, and return what there is.

        ``committed`` is what the store knows. Records beyond it are counted anew;
        ``mean_estimate_tokens`` stands for what those lines were expected to take.
        Reads both files, parses only what is beyond: about a second per GB.

        Raises:
            StorageError: the files cannot be read, or are not what was written.
        """
        finished = LineBitmap()
        try:
            output = self._scan(self._output, committed.output_bytes, finished)
            errors = self._scan(self._errors, committed.error_bytes, finished)
        except OSError as error:
            raise _unusable(self._batch_id, error) from error
        self._sizes = {self._output: output.size_bytes, self._errors: errors.size_bytes}
        new_lines = output.new_records + errors.new_records
        progress = Progress(
            completed=output.records,
            failed=errors.records,
            output_bytes=output.size_bytes,
            error_bytes=errors.size_bytes,
            usage=committed.usage + output.new_usage + errors.new_usage,
            estimated_tokens=committed.estimated_tokens + new_lines * mean_estimate_tokens,
        )
        return Recovered(finished, progress)

    def append(self, output: bytes, errors: bytes) -> None:
        """Write whole records to each file, and force them to the disk.

        Raises:
            StorageError: the disk is full or failing, or somebody else has changed a
                file. A part may have been written: nothing may be appended before the
                next ``recover``.
        """
        try:
            is_new = [self._append(self._output, output), self._append(self._errors, errors)]
            if any(is_new):
                self._sync_names()
        except OSError as error:
            raise _unusable(self._batch_id, error) from error

    def _append(self, path: Path, records: bytes) -> bool:
        """Write and force ``records``; return True when that made the file."""
        if not records:
            return False
        size_bytes = self._sizes.get(path, 0)
        # One that is gone must not begin again: what it held would be missing in the middle.
        create = 0 if size_bytes else os.O_CREAT
        is_new = not path.exists()
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | create, 0o600)
        try:
            if os.fstat(fd).st_size != size_bytes:
                raise StorageError(f"{path} was changed by something else: restore it")
            rest = memoryview(records)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fdatasync(fd)
        finally:
            os.close(fd)
        self._sizes[path] = size_bytes + len(records)
        return is_new

    def _scan(self, path: Path, committed_bytes: int, finished: LineBitmap) -> _Scan:
        scan = _Scan()
        if not path.exists():
            if committed_bytes:
                raise StorageError(
                    f"{path} is gone with {committed_bytes:,} bytes of results: restore it, or"
                    f" cancel batch {self._batch_id}"
                )
            return scan
        with path.open("r+b", buffering=_READ_BYTES) as file:
            for record in file:
                line = record_line(record, self._batch_id)
                if line is None:
                    break
                if not finished.add(line):
                    raise StorageError(f"{path} has a second record for line {line}")
                if scan.size_bytes >= committed_bytes:
                    scan.new_records += 1
                    scan.new_usage += usage_in_record(record)
                scan.records += 1
                scan.size_bytes += len(record)
            if scan.size_bytes < committed_bytes:
                raise StorageError(
                    f"{path} is damaged after byte {scan.size_bytes:,}: restore it, or cancel"
                    f" batch {self._batch_id}"
                )
            file.truncate(scan.size_bytes)
        return scan


@dataclass(slots=True)
class _Scan:
    """What one file holds."""

    records: int = 0
    size_bytes: int = 0
    new_records: int = 0
    new_usage: Usage = field(default_factory=Usage)


def _unusable(batch_id: str, error: OSError) -> StorageError:
    return StorageError(f"the results of batch {batch_id} cannot be written: {error.strerror}")
