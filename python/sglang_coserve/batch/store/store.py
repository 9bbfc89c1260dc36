"""Transactions on the database, in the one thread that owns the connection."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sglang_coserve.batch.store.database import open_database, transaction
from sglang_coserve.lines.worker_threads import WorkerThreads

__all__ = ["Store"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Store:
    """A database that never blocks the event loop."""

    def __init__(self, path: Path, thread: WorkerThreads, connection: sqlite3.Connection) -> None:
        self._path = path
        self._thread = thread
        self._connection = connection

    @classmethod
    async def open(cls, path: Path) -> Store:
        """Open the database at ``path``, or make it.

        Raises:
            StartupError: see ``open_database``.
        """
        thread = WorkerThreads("coserve-store", 1)
        try:
            return cls(path, thread, await thread.run(open_database, path))
        except BaseException:
            await thread.close()
            raise

    async def run(
        self,
        work: Callable[Concatenate[sqlite3.Connection, _P], _T],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        """Return ``work(connection, ...)``, run as one transaction that is kept or leaves no trace.

        Calls run one after the other, in the order in which they were made.

        Raises:
            StorageError: the database cannot be read or written.
            Exception: whatever ``work`` raises, after everything it did is undone.
        """
        return await self._thread.run(lambda: self._transaction(work, *args, **kwargs))

    async def close(self) -> None:
        """Close the database."""
        await self._thread.run(self._connection.close)
        await self._thread.close()

    def _transaction(
        self,
        work: Callable[Concatenate[sqlite3.Connection, _P], _T],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        with transaction(self._connection, self._path):
            return work(self._connection, *args, **kwargs)
