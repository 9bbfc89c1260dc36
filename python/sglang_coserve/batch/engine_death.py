"""Finds out how the last run of the server ended, and which lines may have crashed the engine."""

from __future__ import annotations

import logging

from sglang_coserve.batch.data_directory import DataDirectory
from sglang_coserve.batch.store import Store, suspect_rows
from sglang_coserve.lines.engine_lines import EngineLines
from sglang_coserve.lines.in_flight_file import InFlightFile
from sglang_coserve.lines.worker_threads import WorkerThreads

__all__ = ["open_engine_lines"]

_log = logging.getLogger(__name__)


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
        await store.run(suspect_rows.count_death, last_run)
    suspects = await store.run(suspect_rows.known)
    # Only now: what is counted twice is counted once, what is lost is not.
    await threads.run(file.start)
    return EngineLines(file, suspects)
