"""The output and error files of one job, which a crash may have truncated anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from sglang_coserve.errors import StorageError
from sglang_coserve.lines.progress import Progress, Usage
from sglang_coserve.lines.result_record import RECORD_START, record_identity, usage_in_record

__all__ = ["ResultLog"]

_READ_BYTES: Final = 1 << 20


class ResultLog:
    """Two append-only files of records.

    A record counts only if its line ending has been written. Every call blocks.
    """

    def __init__(
        self,
        output: Path,
        errors: Path,
        sync_names: Callable[[], None],
        *,
        name: str | None = None,
        mode: int = 0o600,
    ) -> None:
        """``name`` is used for the files in error messages; None uses their paths."""
        self.output = output
        self.errors = errors
        self.progress = Progress()
        """Contents of the files since ``scan``; all of it is on disk."""

        self._name = name
        self._sync_names = sync_names
        self._mode = mode

    def scan(
        self,
        add: Callable[[int, int], bool | None],
        committed: Progress | None = None,
        mean_estimate_tokens: int = 0,
        *,
        add_failed: Callable[[int, int], bool | None] | None = None,
    ) -> None:
        """Read the existing files, without changing them. Takes about a second per GB.

        ``add`` is called with (tag, line) of each record; it must return False for a second
        record of a line, and None for a record of another job. ``add_failed``, if given, is
        called for the records of the error file instead.

        ``committed`` is the progress that was committed: all of it must be in the files. Whole
        records after it are parsed and counted, each with an estimate of
        ``mean_estimate_tokens``; anything after these is discarded by ``cut``. With None nothing
        is known: no tokens are counted, and only an unfinished last record is discarded.

        Raises:
            StorageError: the files cannot be read, or have unexpected contents.
        """
        known = committed or Progress()
        output_bytes, error_bytes = (
            (None, None) if committed is None else (known.output_bytes, known.error_bytes)
        )
        output = self._scan(self.output, output_bytes, add)
        errors = self._scan(self.errors, error_bytes, add_failed or add)
        self.progress = Progress(
            completed=output.records,
            failed=errors.records,
            output_bytes=output.size_bytes,
            error_bytes=errors.size_bytes,
            usage=known.usage + output.new_usage + errors.new_usage,
            estimated_tokens=known.estimated_tokens
            + (output.new_records + errors.new_records) * mean_estimate_tokens,
        )

    def drop_errors(self) -> None:
        """Discard the contents of the error file at the next ``cut``."""
        self.progress = replace(self.progress, failed=0, error_bytes=0)

    def cut(self) -> None:
        """Truncate the files after the records that ``scan`` has found.

        Raises:
            StorageError: the disk is failing.
        """
        for path, size_bytes in self._sizes():
            try:
                if path.exists():
                    os.truncate(path, size_bytes)
            except OSError as error:
                raise self._failed("written", path, error) from error

    def append(self, output: bytes, errors: bytes, progress: Progress) -> None:
        """Append whole records to each file, and force them to disk.

        ``progress`` describes the contents of the files afterwards.

        Raises:
            StorageError: the disk is full or failing, or another process has changed a
                file. Nothing may be appended before the next ``scan``.
        """
        is_new = [
            self._append(path, size_bytes, records)
            for (path, size_bytes), records in zip(self._sizes(), (output, errors), strict=True)
        ]
        if any(is_new):
            self._sync_names()
        self.progress = progress

    def _sizes(self) -> tuple[tuple[Path, int], tuple[Path, int]]:
        return (
            (self.output, self.progress.output_bytes),
            (self.errors, self.progress.error_bytes),
        )

    def _append(self, path: Path, size_bytes: int, records: bytes) -> bool:
        """Append ``records`` and force them to disk; return True if the file was created."""
        if not records:
            return False
        # A file that has disappeared must not be created anew: its records would be missing.
        create = 0 if size_bytes else os.O_CREAT
        is_new = not path.exists()
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | create, self._mode)
            try:
                if os.fstat(fd).st_size != size_bytes:
                    raise StorageError(f"{path} was changed by something else: restore it")
                _write(fd, records, size_bytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._failed("written", path, error) from error
        return is_new

    def _failed(self, verb: str, path: Path, error: OSError) -> StorageError:
        return StorageError(f"{self._name or path} cannot be {verb}: {error.strerror}")

    def _scan(
        self, path: Path, committed_bytes: int | None, add: Callable[[int, int], bool | None]
    ) -> _Scan:
        scan = _Scan()
        if not path.exists():
            if committed_bytes:
                raise StorageError(
                    f"{path} is gone with {committed_bytes:,} bytes of results: restore it, or"
                    " cancel its batch"
                )
            return scan
        try:
            with path.open("rb", buffering=_READ_BYTES) as file:
                for record in file:
                    identity = record_identity(record)
                    is_new = add(*identity) if identity else None
                    if is_new is None or identity is None:
                        if committed_bytes is None and not _is_unfinished(record):
                            raise StorageError(
                                f"line {scan.records + 1} of {path} is not a batch result:"
                                " choose another output, or move this file away"
                            )
                        break
                    if not is_new:
                        raise StorageError(f"{path} has a second result for line {identity[1]}")
                    if committed_bytes is not None and scan.size_bytes >= committed_bytes:
                        scan.new_records += 1
                        scan.new_usage += usage_in_record(record)
                    scan.records += 1
                    scan.size_bytes += len(record)
        except OSError as error:
            raise self._failed("read", path, error) from error
        if scan.size_bytes < (committed_bytes or 0):
            raise StorageError(
                f"{path} is damaged after byte {scan.size_bytes:,}: restore it, or cancel its batch"
            )
        return scan


@dataclass(slots=True)
class _Scan:
    """The contents of one file."""

    records: int = 0
    size_bytes: int = 0
    new_records: int = 0
    new_usage: Usage = field(default_factory=Usage)


def _write(fd: int, records: bytes, size_bytes: int) -> None:
    """Append all ``records`` to a file of ``size_bytes``, or none of them."""
    try:
        rest = memoryview(records)
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError:
        with suppress(OSError):  # If this fails, the next ``scan`` finds the partial record.
            os.ftruncate(fd, size_bytes)
        raise
    os.fdatasync(fd)


def _is_unfinished(record: bytes) -> bool:
    """Return whether this is the beginning of a record whose end was never written."""
    # A power failure can leave zeros where the data were not yet on disk.
    found = record.rstrip(b"\0")
    return not found.endswith(b"\n") and RECORD_START.startswith(found[: len(RECORD_START)])
