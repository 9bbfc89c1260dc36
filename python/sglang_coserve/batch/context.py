"""The processes that read input files, and what all batches of one service share."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from sglang_coserve.batch.data_directory import DataDirectory
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.record import JobRecord, Status
from sglang_coserve.batch.state import Event, Failed, Validated
from sglang_coserve.batch.store import Store, batch_rows
from sglang_coserve.jsonl.check_file import CheckLimits, LineFault
from sglang_coserve.lines.backend import Backend
from sglang_coserve.lines.background import TaskSupervisor, WorkerThreads, run_module
from sglang_coserve.lines.engine_lines import EngineLines, InFlightFile
from sglang_coserve.lines.fair_slots import FairSlots, JobShare
from sglang_coserve.lines.serve_line import LineContext

_MOST: Final = 2
"""So that a small file does not wait for a large one."""

_MODULE: Final = "sglang_coserve.jsonl.check_file"


class FileProcesses:
    """Runs them in turns; owners get equal shares of the bytes that are read.

    Cancelling a call ends its process.
    """

    def __init__(self) -> None:
        self._turns = FairSlots(_MOST, max_bytes=1)

    async def validate(
        self, batch: JobRecord, path: Path, limits: BatchLimits, backend: Backend, order: Path
    ) -> Validated | Failed:
        """Return a summary of the input, or the errors for which ``backend`` cannot use it.

        The order of the lines of a good one is then in ``order``. An engine orders by itself what
        it has at once, but of a long file that is only a few hundred lines at a time.

        Raises:
            StorageError: the check itself failed; the file may be good.
        """
        wanted = CheckLimits(
            limits.max_lines,
            backend.limits.max_bytes,
            limits.max_reported_errors,
            backend.limits.context_tokens,
            limits.max_in_flight,
            backend.model_names,
        )
        async with self._turn(batch, await asyncio.to_thread(_size_bytes, path)):
            arguments = (str(path), batch.endpoint, json.dumps(asdict(wanted)), str(order))
            report = await run_module(f"checking {path}", _MODULE, *arguments)
        if report["faults"]:
            return Failed(tuple(LineFault(**fault) for fault in report["faults"]))
        return Validated(report["requests"], report["estimated_tokens"], report["model"])

    async def custom_id(self, batch: JobRecord, path: Path, offset: int, size_bytes: int) -> str:
        """Return the id of the line of ``size_bytes`` at ``offset``, which has been checked.

        Raises:
            StorageError: the line is not what it was then.
        """
        async with self._turn(batch, size_bytes):
            what = f"reading the line at byte {offset} of {path}"
            return str(await run_module(what, _MODULE, str(path), batch.endpoint, str(offset)))

    @asynccontextmanager
    async def _turn(self, batch: JobRecord, size_bytes: int) -> AsyncGenerator[None]:
        share = JobShare(batch.owner, batch.priority, batch.weight, batch.expires_at_s)
        self._turns.join(share)
        try:
            await self._turns.acquire(share, 0, size_bytes)
            try:
                yield
            finally:
                self._turns.release(share, 0, size_bytes, size_bytes)
        finally:
            self._turns.leave(share)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # The process will say what is wrong with it.


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext(LineContext):
    """The means of running batches."""

    backend: Backend
    directory: DataDirectory
    store: Store
    limits: BatchLimits
    file_processes: FileProcesses
    background: TaskSupervisor

    record_events: bool
    """Whether the ends of batches are put into the outbox."""

    async def apply(
        self,
        batch_id: str,
        event: Event,
        *,
        owner: str | None = None,
        expected: Status | None = None,
    ) -> JobRecord:
        """Take a batch through an event; see ``batch_rows.apply``, also for what is raised."""
        return await self.store.run(
            batch_rows.apply,
            batch_id,
            event,
            self.clock.now_s(),
            owner=owner,
            expected=expected,
            outbox_id=new_id("evt_", self.rng) if self.record_events else None,
        )


def new_id(prefix: str, rng: random.Random) -> str:
    """Return an id that is as unpredictable as ``rng``."""
    return f"{prefix}{rng.getrandbits(96):024x}"


async def open_engine_lines(
    directory: DataDirectory, store: Store, threads: WorkerThreads
) -> EngineLines:
    """Read how the last run of the server ended, and record the start of this one.

    Raises:
        StorageError: the disk is full or failing.
    """
    file = InFlightFile(directory.in_flight, directory.fatal_signal)
    last_run = await threads.run(file.last_run)
    if last_run is not None and last_run.engine_died:
        _log.error(
            "the engine ended by itself with %d lines of batches in it%s%s",
            len(last_run.lines),
            "; each of them is served alone once" if last_run.lines else "",
            f"; the server's process ended with:\n{last_run.trace}" if last_run.trace else "",
        )
        await store.run(batch_rows.count_death, last_run)
    suspects = await store.run(batch_rows.suspects)
    # Only now: what is counted twice is counted once, what is lost is not.
    await threads.run(file.start)
    return EngineLines(file, suspects)
