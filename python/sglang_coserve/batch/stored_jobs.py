"""The batches of a data directory that no server has open."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

from sglang_coserve.batch.data_directory import DataDirectory
from sglang_coserve.batch.record import JobRecord
from sglang_coserve.batch.state import Event
from sglang_coserve.batch.store import batch_rows
from sglang_coserve.batch.store.database import open_database, transaction
from sglang_coserve.errors import StartupError


class StoredJobs:
    """Shows batches and changes their states; the next start of a server carries it out.

    Every call blocks.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path

    @classmethod
    @contextmanager
    def open(cls, directory: Path) -> Generator[StoredJobs]:
        """Lock ``directory`` against servers within this context.

        Raises:
            StartupError: it is no data directory, or it cannot be used.
            InUseError: a server has it.
        """
        data = DataDirectory(directory)
        if not data.database.exists():
            raise StartupError(
                f"{directory} holds no batches (there is no {data.database.name} in it): name the"
                " --coserve-data-dir of the server"
            )
        data.open()
        try:
            with closing(open_database(data.database)) as connection:
                yield cls(connection, data.database)
        finally:
            data.close()

    def newest(self, limit: int) -> list[JobRecord]:
        """Return up to ``limit`` batches of all owners, the newest first.

        Raises:
            StorageError: the database cannot be read.
        """
        with transaction(self._connection, self._path):
            return batch_rows.page(self._connection, None, after=None, limit=limit)

    def change(self, batch_id: str, event: Event) -> JobRecord:
        """Take a batch through an event that comes from outside; it is on the disk afterwards.

        Raises:
            NotFoundError: there is no such batch.
            ConflictError: its state forbids it.
            StorageError: the database cannot be written.
        """
        with transaction(self._connection, self._path):
            return batch_rows.apply(self._connection, batch_id, event, time.time())
