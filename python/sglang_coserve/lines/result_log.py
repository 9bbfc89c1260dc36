"""The output and error files of one job, which a crash may have truncated anywhere.

Results that finish together are written, synced and counted together.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sglang_coserve.disk_room import no_bound
from sglang_coserve.durable_files import append, settle, sync_names
from sglang_coserve.errors import StorageError, disk_errors
from sglang_coserve.lines.background import Clock, WorkerThreads, to_its_end
from sglang_coserve.lines.result_record import (
    Progress,
    Usage,
    record_identity,
    usage_in_record,
)

_READ_BYTES: Final = 1 << 20


class ResultLog:
    """Two append-only files of records.

    A record counts only if all of it is on the disk. Every call blocks, and raises ``StorageError``
    when the disk is full or failing.
    """

    def __init__(
        self,
        output: Path,
        errors: Path,
        *,
        name: str | None = None,
        room: Callable[[int], AbstractContextManager[None]] = no_bound,
    ) -> None:
        """``name`` is used for the files in error messages; None uses their paths.

        ``room`` is entered to write so many bytes; it raises OSError when the disk counts as full.
        """
        self.output = output
        self.errors = errors
        self.progress = Progress()
        """Contents of the files since ``scan``; all of it is on the disk after ``cut``."""

        self._name = name
        self._synced_bytes = (0, 0)
        self._room = room

    def scan(
        self,
        add: Callable[[int, int], bool | None],
        committed: Progress,
        mean_estimate_tokens: int = 0,
    ) -> None:
        """Read the existing files, without changing them. Takes about a second per GB.

        ``add`` is called with (tag, line) of each record; it must return False for a second
        record of a line, and None for a record of another job.

        ``committed`` is the progress that was committed: all of it must be in the files. Whole
        records after it are parsed and counted, each with an estimate of
        ``mean_estimate_tokens``; anything after these is discarded by ``cut``.

        Raises:
            StorageError: the files cannot be read, or have unexpected contents.
        """
        output = self._scan(self.output, committed.output_bytes, add)
        errors = self._scan(self.errors, committed.error_bytes, add)
        self._synced_bytes = (committed.output_bytes, committed.error_bytes)
        self.progress = Progress(
            completed=output.records,
            failed=errors.records,
            output_bytes=output.size_bytes,
            error_bytes=errors.size_bytes,
            usage=committed.usage + output.new_usage + errors.new_usage,
            estimated_tokens=committed.estimated_tokens
            + (output.new_records + errors.new_records) * mean_estimate_tokens,
        )

    def cut(self) -> None:
        """Truncate the files after the records that ``scan`` has found, and force these to disk.

        Until then they may be in memory only: nothing may be committed.
        """
        for (path, size_bytes), synced_bytes in zip(self._sizes(), self._synced_bytes, strict=True):
            with self._disk_errors("written", path):
                if path.exists():
                    settle(path, size_bytes, synced_bytes)

    def append(self, output: bytes, errors: bytes, progress: Progress) -> None:
        """Append whole records to each file, and force them to disk.

        ``progress`` describes the contents of the files afterwards.

        Raises:
            StorageError: the disk is full or failing, or another process has changed a
                file. Nothing may be appended before the next ``scan``.
        """
        with (
            self._disk_errors("written", self.output),
            self._room(len(output) + len(errors)),
        ):
            for (path, size_bytes), records in zip(self._sizes(), (output, errors), strict=True):
                if records:
                    self._append(path, size_bytes, records)
        self.progress = progress

    def _sizes(self) -> tuple[tuple[Path, int], tuple[Path, int]]:
        return (
            (self.output, self.progress.output_bytes),
            (self.errors, self.progress.error_bytes),
        )

    def _append(self, path: Path, size_bytes: int, records: bytes) -> None:
        # A file that has disappeared must not be created anew: its records would be missing.
        create = 0 if size_bytes else os.O_CREAT
        with self._disk_errors("written", path):
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | create, 0o600)
            try:
                if os.fstat(fd).st_size != size_bytes:
                    raise StorageError(f"{path} was changed by something else: restore it")
                append(fd, records, size_bytes)
            finally:
                os.close(fd)
            if not size_bytes:
                sync_names(path.parent)

    def _disk_errors(self, verb: str, path: Path) -> AbstractContextManager[None]:
        return disk_errors(f"{self._name or path} cannot be {verb}")

    def _scan(
        self, path: Path, committed_bytes: int, add: Callable[[int, int], bool | None]
    ) -> _Scan:
        scan = _Scan()
        if not path.exists():
            if committed_bytes:
                raise StorageError(
                    f"{path} is gone with {committed_bytes:,} bytes of results: restore it, or"
                    " cancel its batch"
                )
            return scan
        with self._disk_errors("read", path), path.open("rb", buffering=_READ_BYTES) as file:
            for record in file:
                end_bytes = scan.size_bytes + len(record)
                # What was committed was synced, so it is as it was written.
                is_unsynced = end_bytes > committed_bytes
                identity = record_identity(record)
                usage = usage_in_record(record) if identity and is_unsynced else Usage()
                is_new = add(*identity) if identity and usage is not None else None
                if identity is None or usage is None or is_new is None:
                    break
                if not is_new:
                    raise StorageError(f"{path} has a second result for line {identity[1]}")
                if is_unsynced:
                    scan.new_records += 1
                    scan.new_usage += usage
                scan.records += 1
                scan.size_bytes = end_bytes
        if scan.size_bytes < committed_bytes:
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


_MAX_PENDING_BYTES: Final = 4 << 20


class ResultWriter:
    """The only writer of a job's output and error files.

    Records are on disk before ``commit`` counts them, so a counted result is never lost.
    """

    def __init__(
        self,
        log: ResultLog,
        commit: Callable[[Progress], Awaitable[None]],
        threads: WorkerThreads,
        clock: Clock,
        interval_s: float,
    ) -> None:
        self._log = log
        self._committed: Progress | None = None
        self.progress = log.progress
        """Contents of the files once all added records are written."""

        self._commit = commit
        self._threads = threads
        self._clock = clock
        self._interval_s = interval_s
        self._output = bytearray()
        self._errors = bytearray()
        self._has_pending = asyncio.Event()
        self._has_room = asyncio.Event()
        self._flushing = asyncio.Lock()
        self._has_room.set()
        self._task = asyncio.create_task(self._flush_regularly())

    def add(self, record: bytes, *, is_ok: bool, usage: Usage, estimated_tokens: int) -> None:
        """Queue the record of one line, to be written soon."""
        (self._output if is_ok else self._errors).extend(record)
        size_bytes = len(record)
        self.progress += (
            Progress(1, 0, size_bytes, 0, usage, estimated_tokens)
            if is_ok
            else Progress(0, 1, 0, size_bytes, usage, estimated_tokens)
        )
        self._has_pending.set()
        if len(self._output) + len(self._errors) >= _MAX_PENDING_BYTES:
            self._has_room.clear()

    async def room(self) -> None:
        """Wait while too many bytes are queued.

        Raises:
            StorageError: writing has failed.
        """
        await self._has_room.wait()
        if self._task.done():
            self._task.result()

    async def failure(self) -> None:
        """Wait until writing fails, and raise its ``StorageError``."""
        await asyncio.shield(self._task)

    async def close(self) -> None:
        """Write all queued records and stop, even if the caller is cancelled meanwhile.

        Raises:
            StorageError: writing failed, now or before.
        """
        await to_its_end(self._close())

    async def _close(self) -> None:
        # While the lock is held, the task is between two flushes.
        async with self._flushing:
            self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()
        await self._flush()

    async def _flush_regularly(self) -> None:
        try:
            while True:
                await self._has_pending.wait()
                if self._has_room.is_set():
                    await self._clock.sleep(self._interval_s)
                async with self._flushing:
                    await self._flush()
        finally:
            # Wake waiters, as no more room will be made.
            self._has_room.set()

    async def _flush(self) -> None:
        output, errors, progress = bytes(self._output), bytes(self._errors), self.progress
        self._output.clear()
        self._errors.clear()
        self._has_pending.clear()
        self._has_room.set()
        if output or errors:
            await self._threads.run(self._log.append, output, errors, progress)
        if progress != self._committed:
            await self._commit(progress)
            self._committed = progress
