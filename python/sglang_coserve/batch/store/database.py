"""The database: checked, durable, and in threads of its own.

A row is a record in JSON. What queries and indexes need of a record are generated columns, which
SQLite reads out of the JSON.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, TypeVar

import msgspec

from sglang_coserve.batch.data_directory import OTHER_DIRECTORY
from sglang_coserve.errors import StartupError, StorageError
from sglang_coserve.lines.background import WorkerThreads

_T = TypeVar("_T")

SCHEMA: Final = (
    """
    CREATE TABLE files (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        record TEXT NOT NULL,
        id TEXT NOT NULL UNIQUE AS (json_extract(record, '$.id')),
        owner TEXT NOT NULL AS (json_extract(record, '$.owner')),
        purpose TEXT NOT NULL AS (json_extract(record, '$.purpose')),
        size_bytes INTEGER NOT NULL AS (json_extract(record, '$.size_bytes')),
        expires_at_s REAL AS (json_extract(record, '$.expires_at_s'))
    ) STRICT
    """,
    "CREATE INDEX files_by_owner ON files (owner, seq)",
    "CREATE INDEX files_by_purpose ON files (owner, purpose, size_bytes)",
    "CREATE INDEX files_by_expiry ON files (expires_at_s) WHERE expires_at_s IS NOT NULL",
    """
    CREATE TABLE batches (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        record TEXT NOT NULL,
        id TEXT NOT NULL UNIQUE AS (json_extract(record, '$.id')),
        owner TEXT NOT NULL AS (json_extract(record, '$.owner')),
        idempotency_key TEXT AS (json_extract(record, '$.idempotency_key')),
        is_response INTEGER NOT NULL AS (json_extract(record, '$.response') IS NOT NULL),
        input_file_id TEXT NOT NULL AS (json_extract(record, '$.input_file_id')),
        output_file_id TEXT NOT NULL AS (json_extract(record, '$.output_file_id')),
        error_file_id TEXT NOT NULL AS (json_extract(record, '$.error_file_id')),
        status TEXT NOT NULL AS (json_extract(record, '$.status')),
        ended_at_s REAL AS (coalesce(
            json_extract(record, '$.completed_at_s'), json_extract(record, '$.failed_at_s'),
            json_extract(record, '$.expired_at_s'), json_extract(record, '$.cancelled_at_s')
        )),
        row_bytes INTEGER NOT NULL AS (length(CAST(record AS BLOB)))
    ) STRICT
    """,
    "CREATE INDEX batches_by_owner ON batches (owner, is_response, seq)",
    "CREATE UNIQUE INDEX batches_by_key ON batches (owner, idempotency_key)"
    " WHERE idempotency_key IS NOT NULL",
    # With all that is asked of many of them, so that no record is parsed for that.
    "CREATE INDEX batches_unfinished ON batches"
    " (seq, is_response, owner, input_file_id, output_file_id, error_file_id)"
    " WHERE ended_at_s IS NULL",
    "CREATE INDEX batches_ended ON batches (owner, row_bytes) WHERE ended_at_s IS NOT NULL",
    "CREATE INDEX batches_by_end ON batches (is_response, ended_at_s) WHERE ended_at_s IS NOT NULL",
    """
    CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        record TEXT NOT NULL,
        id TEXT NOT NULL UNIQUE AS (json_extract(record, '$.id')),
        due_at_s REAL NOT NULL AS (json_extract(record, '$.due_at_s'))
    ) STRICT
    """,
    """
    CREATE TABLE suspects (
        batch_id TEXT NOT NULL,
        line INTEGER NOT NULL,
        deaths INTEGER NOT NULL,
        last_run TEXT NOT NULL,
        PRIMARY KEY (batch_id, line)
    ) STRICT, WITHOUT ROWID
    """,
    # Where in the order of its kind a row was that is gone: a list goes on behind it.
    "CREATE TABLE places (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,"
    " owner TEXT NOT NULL, seq INTEGER NOT NULL) STRICT",
    *(
        f"CREATE TRIGGER {table}_deleted AFTER DELETE ON {table} BEGIN"
        " INSERT OR REPLACE INTO places (id, owner, seq) VALUES (old.id, old.owner, old.seq);"
        " DELETE FROM places WHERE number <= (SELECT max(number) FROM places) - 100000; END"
        for table in ("files", "batches")
    ),
)

LAYOUT: Final = 10
"""Number of the tables and columns above. A field of a record is neither, so another field leaves
the number as it is."""


_APPLICATION_ID: Final = 0x636F7376
"""Identifies our databases among SQLite files."""


def open_database(path: Path, hint: str = OTHER_DIRECTORY) -> sqlite3.Connection:
    """Open ``path``, or make it. The connection belongs to the calling thread.

    What a transaction has written is on the disk when it has been committed. ``hint`` says in
    errors what to do about a directory that cannot be used.

    Raises:
        StartupError: it is damaged, not ours, of another layout, or cannot be
            written. Nothing is changed then.
    """
    try:
        connection = sqlite3.connect(path, isolation_level=None)
    except sqlite3.Error as error:
        raise _unusable(path, str(error), hint) from error
    try:
        is_new = _check(connection, path, hint)
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            reason = f"its file system supports no write-ahead log ({mode})"
            raise _unusable(path, reason, hint)
        connection.execute("PRAGMA synchronous = FULL")
        if is_new:
            connection.execute("BEGIN IMMEDIATE")
            for statement in SCHEMA:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {LAYOUT}")
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        connection.close()
        raise _unusable(path, str(error), hint) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection, path: Path, hint: str) -> bool:
    """Return True if the database is empty."""
    faults = [row[0] for row in connection.execute("PRAGMA integrity_check(3)")]
    if faults != ["ok"]:
        raise _unusable(path, f"it is damaged ({faults[0].splitlines()[-1]})", hint)
    if not connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
        return True
    if _pragma(connection, "application_id") != _APPLICATION_ID:
        raise _unusable(path, "it is the database of another program", hint)
    layout = _pragma(connection, "user_version")
    if layout != LAYOUT:
        writer = "0.1.0" if layout < LAYOUT else "of a later version"
        raise StartupError(
            f"cannot use the batch database {path}: sglang_coserve {writer} wrote it (layout"
            f" {layout}, and this version has {LAYOUT}); finish its batches with that version, then"
            f" move the whole data directory away, or {hint}"
        )
    return False


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value


def _unusable(path: Path, reason: str, hint: str) -> StartupError:
    return StartupError(
        f"cannot use the batch database {path}: {reason}; restore it, move it away, or {hint}"
    )


def _open_for_lists(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA query_only = ON")
    return connection


_P = ParamSpec("_P")


class Store:
    """A database that never blocks the event loop."""

    def __init__(
        self,
        path: Path,
        thread: WorkerThreads,
        connection: sqlite3.Connection,
        make_room: Callable[[], None],
    ) -> None:
        """Made by ``open``."""
        self._path = path
        self._thread = thread
        self._connection = connection
        self._make_room = make_room
        self.lists = self
        """The same database, read in another thread: no commit waits for a list."""

    @classmethod
    async def open(
        cls, path: Path, make_room: Callable[[], None] = lambda: None, hint: str = OTHER_DIRECTORY
    ) -> Store:
        """Open the database at ``path``, or make it.

        ``make_room`` is called when the disk is full, before a transaction is tried once more.
        ``hint`` is for ``open_database``.

        Raises:
            StartupError: see ``open_database``.
        """
        connect = partial(open_database, hint=hint)
        store = await cls._open("coserve-store", connect, path, make_room)
        try:
            store.lists = await cls._open("coserve-lists", _open_for_lists, path, make_room)
        except BaseException:
            await store.close()
            raise
        return store

    @classmethod
    async def _open(
        cls,
        name: str,
        connect: Callable[[Path], sqlite3.Connection],
        path: Path,
        make_room: Callable[[], None],
    ) -> Store:
        thread = WorkerThreads(name, 1)
        try:
            return cls(path, thread, await thread.run(connect, path), make_room)
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
        bound = partial(work, self._connection, *args, **kwargs)
        return await self._thread.run(self._transaction, bound)

    async def close(self) -> None:
        """Close the database."""
        if self.lists is not self:
            await self.lists.close()
        await self._thread.run(self._connection.close)
        await self._thread.close()

    def _transaction(self, work: Callable[[], _T]) -> _T:
        try:
            try:
                return self._attempt(work)
            except sqlite3.OperationalError as error:
                if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_FULL:
                    raise
            self._make_room()
            return self._attempt(work)
        except (sqlite3.Error, msgspec.ValidationError) as error:
            raise StorageError(f"the batch database {self._path} failed: {error}") from error

    def _attempt(self, work: Callable[[], _T]) -> _T:
        connection = self._connection
        connection.execute("BEGIN")
        try:
            result = work()
            connection.execute("COMMIT")
        except BaseException:
            # A full disk makes SQLite roll back by itself.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return result
