"""What all batches of one service share."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from sglang_coserve.batch.data_directory import DataDirectory
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.record import JobRecord, Status
from sglang_coserve.batch.state import Event
from sglang_coserve.batch.store import Store, batch_rows
from sglang_coserve.lines.backend import Backend
from sglang_coserve.lines.background import TaskSupervisor, WorkerThreads
from sglang_coserve.lines.engine_lines import EngineLines, InFlightFile
from sglang_coserve.lines.fair_slots import FairSlots
from sglang_coserve.lines.serve_line import LineContext

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext(LineContext):
    """The means of running batches."""

    backend: Backend
    directory: DataDirectory
    store: Store
    limits: BatchLimits
    background: TaskSupervisor

    reading_turns: FairSlots
    """Of the processes that read input files: owners get equal shares of the bytes."""

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

    async def delete_old(self, retention_s: float, *, are_responses: bool) -> None:
        """Forget the batches, or responses, that ended longer ago than ``retention_s``."""
        now_s = self.clock.now_s()
        while await self.store.run(
            batch_rows.delete_old, now_s - retention_s, now_s, are_responses=are_responses
        ):
            pass


EventDelivery = Callable[[JobContext], AbstractAsyncContextManager[None]]
"""Delivers the ends of batches, which are in the store's outbox, for as long as it is entered."""


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
