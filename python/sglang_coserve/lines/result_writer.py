"""Group commit: results that finish together are written, synced and counted together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from sglang_coserve.lines.clock import Clock
from sglang_coserve.lines.progress import Progress, Usage
from sglang_coserve.lines.result_log import ResultLog
from sglang_coserve.lines.worker_threads import WorkerThreads, to_its_end

__all__ = ["ResultWriter"]

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
