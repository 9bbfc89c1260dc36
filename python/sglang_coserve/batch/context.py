"""The dependencies that all batches of one service share."""

from __future__ import annotations

import math
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from sglang_coserve.batch.data_directory import DataDirectory
from sglang_coserve.batch.engine_death import open_engine_lines
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.store import Store
from sglang_coserve.lines.backend import Backend
from sglang_coserve.lines.clock import Clock, SystemClock
from sglang_coserve.lines.context import LineContext
from sglang_coserve.lines.engine_lines import EngineLines
from sglang_coserve.lines.fair_slots import FairSlots
from sglang_coserve.lines.retry import EngineHealth, RetryPolicy
from sglang_coserve.lines.worker_threads import WorkerThreads

__all__ = ["JobContext", "new_id"]

_FILE_THREADS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext(LineContext):
    """The means of running batches."""

    backend: Backend
    directory: DataDirectory
    store: Store
    limits: BatchLimits

    @classmethod
    async def open(
        cls,
        directory: Path,
        backend: Backend,
        limits: BatchLimits,
        *,
        dies_with_engine: bool,
        clock: Clock | None,
        rng: random.Random | None,
    ) -> Self:
        """Open or create ``directory``; see ``BatchService.open``.

        Raises:
            StartupError: the directory cannot be used, or another server is using it.
            StorageError: the disk failed.
        """
        async with AsyncExitStack() as opened:
            data = DataDirectory(directory)
            data.open()
            opened.callback(data.close)
            store = await Store.open(data.database)
            opened.push_async_callback(store.close)
            threads = WorkerThreads("coserve-files", _FILE_THREADS)
            opened.push_async_callback(threads.close)
            engine_lines = EngineLines()
            if dies_with_engine:
                engine_lines = await open_engine_lines(data, store, threads)
            opened.pop_all()
        backend.when_changing(engine_lines.take_out)
        return cls(
            directory=data,
            store=store,
            threads=threads,
            slots=FairSlots(limits.max_in_flight, limits.max_in_flight_bytes),
            engine_lines=engine_lines,
            backend=backend,
            limits=limits,
            clock=clock or SystemClock(),
            rng=rng or random.SystemRandom(),
            retry_policy=RetryPolicy(
                math.inf,
                limits.max_attempts,
                limits.first_retry_delay_s,
                limits.max_retry_delay_s,
            ),
            health=EngineHealth(),
            flush_interval_s=limits.flush_interval_s,
            journal_interval_s=limits.journal_interval_s,
        )

    async def close(self) -> None:
        """Release the directory, and end the threads."""
        self.engine_lines.close()
        await self.threads.close()
        await self.store.close()
        self.directory.close()


def new_id(prefix: str, rng: random.Random) -> str:
    """Return an id that is as unpredictable as ``rng``."""
    return f"{prefix}{rng.getrandbits(96):024x}"
