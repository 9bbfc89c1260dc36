"""The database: checked, durable, at this version's schema, in the thread that owns it.

The schema is the steps that lead to it. A released step is never changed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, TypeVar

from sglang_coserve.errors import StartupError, StorageError
from sglang_coserve.lines.background import WorkerThreads

_T = TypeVar("_T")

_FILES = """
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    created_at_s REAL NOT NULL,
    expires_at_s REAL
) STRICT
"""

_BATCHES = """
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    output_file_id TEXT NOT NULL,
    error_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    metadata TEXT,
    output_expires_after_s REAL,
    priority INTEGER NOT NULL,
    weight REAL NOT NULL,
    idempotency_key TEXT,
    fingerprint TEXT NOT NULL,
    status TEXT NOT NULL,
    is_paused INTEGER NOT NULL,
    is_past_deadline INTEGER NOT NULL,
    created_at_s REAL NOT NULL,
    expires_at_s REAL NOT NULL,
    in_progress_at_s REAL,
    finalizing_at_s REAL,
    completed_at_s REAL,
    failed_at_s REAL,
    expired_at_s REAL,
    cancelling_at_s REAL,
    cancelled_at_s REAL,
    total_lines INTEGER NOT NULL,
    estimated_tokens INTEGER NOT NULL,
    completed_lines INTEGER NOT NULL,
    failed_lines INTEGER NOT NULL,
    output_bytes INTEGER NOT NULL,
    error_bytes INTEGER NOT NULL,
    finished_estimated_tokens INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    reasoning_tokens INTEGER NOT NULL,
    faults TEXT NOT NULL
) STRICT
"""

_EVENTS = """
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    type TEXT NOT NULL,
    batch_id TEXT NOT NULL,
    owner TEXT NOT NULL,
    created_at_s REAL NOT NULL,
    attempts INTEGER NOT NULL,
    due_at_s REAL NOT NULL
) STRICT
"""

_SUSPECTS = """
CREATE TABLE suspects (
    batch_id TEXT NOT NULL,
    line INTEGER NOT NULL,
    deaths INTEGER NOT NULL,
    last_run TEXT NOT NULL,
    PRIMARY KEY (batch_id, line)
) STRICT, WITHOUT ROWID
"""

MIGRATIONS: Final = (
    (
        _FILES,
        "CREATE INDEX files_by_owner ON files (owner, seq)",
        "CREATE INDEX files_by_expiry ON files (expires_at_s) WHERE expires_at_s IS NOT NULL",
        _BATCHES,
        "CREATE INDEX batches_by_owner ON batches (owner, seq)",
        "CREATE UNIQUE INDEX batches_by_key ON batches (owner, idempotency_key)"
        " WHERE idempotency_key IS NOT NULL",
        "CREATE INDEX batches_unfinished ON batches (seq)"
        " WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling')",
        _EVENTS,
    ),
    (
        _SUSPECTS,
        # What answered the lines so far, and how many lines something else had answered.
        "ALTER TABLE batches ADD COLUMN model TEXT",
        "ALTER TABLE batches ADD COLUMN earlier_model_lines INTEGER NOT NULL DEFAULT 0",
    ),
    (
        # What offline work got in each hour since the epoch.
        "CREATE TABLE served_hours"
        " (hour INTEGER PRIMARY KEY, tokens REAL NOT NULL, busy_s REAL NOT NULL) STRICT",
        # How long a batch was to take; null where that cannot be compared with what it took.
        "ALTER TABLE batches ADD COLUMN forecast_s REAL",
    ),
    (
        # By how much a batch has delayed online requests.
        "ALTER TABLE batches ADD COLUMN online_delay_s REAL",
    ),
    ("DROP TABLE served_hours",),
    (
        # What the object of a background response repeats of its request, in JSON; null for a
        # batch.
        "ALTER TABLE batches ADD COLUMN response TEXT",
        "CREATE INDEX responses ON batches (created_at_s) WHERE response IS NOT NULL",
    ),
    ("ALTER TABLE batches ADD COLUMN model_name TEXT",),
    (
        # What a row takes, nearly: of its owner's ended batches there are so many bytes at most.
        "ALTER TABLE batches ADD COLUMN row_bytes INTEGER GENERATED ALWAYS AS"
        " (512 + length(CAST(faults AS BLOB)) + coalesce(length(CAST(metadata AS BLOB)), 0)"
        " + coalesce(length(CAST(response AS BLOB)), 0)) VIRTUAL",
        "CREATE INDEX batches_ended ON batches (owner, status, row_bytes)",
        "CREATE INDEX batches_by_age ON batches (created_at_s) WHERE response IS NULL",
        # Where in the order of its kind a row was that is gone: a list goes on behind it.
        "CREATE TABLE places (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,"
        " owner TEXT NOT NULL, seq INTEGER NOT NULL) STRICT",
        *(
            f"CREATE TRIGGER {table}_deleted AFTER DELETE ON {table} BEGIN"
            " INSERT OR REPLACE INTO places (id, owner, seq) VALUES (old.id, old.owner, old.seq);"
            f" DELETE FROM places WHERE number <= (SELECT max(number) FROM places) - 100000; END"
            for table in ("files", "batches")
        ),
    ),
    (
        "ALTER TABLE batches DROP COLUMN weight",
        "ALTER TABLE batches DROP COLUMN forecast_s",
    ),
    ("ALTER TABLE batches ADD COLUMN last_record_at_s REAL",),
)
"""Step ``n`` takes a database from version ``n`` to ``n + 1``."""


def place(connection: sqlite3.Connection, table: str, row_id: str, owner: str | None) -> int | None:
    """Return where in the order of ``table`` a row of ``owner`` is, or was; None if unknown.

    None as ``owner`` is anybody. The last 100,000 deleted rows are known.
    """
    owned = "id = :id AND coalesce(:owner, owner) = owner"
    row = connection.execute(
        f"SELECT seq FROM {table} WHERE {owned} UNION ALL SELECT seq FROM places WHERE {owned}",
        {"id": row_id, "owner": owner},
    ).fetchone()
    return None if row is None else int(row[0])


_APPLICATION_ID: Final = 0x636F7376
"""Identifies our databases among SQLite files."""


def open_database(
    path: Path, migrations: Sequence[Sequence[str]] = MIGRATIONS
) -> sqlite3.Connection:
    """Open ``path``, or make it. The connection belongs to the calling thread.

    What a transaction has written is on the disk when it has been committed.

    Raises:
        StartupError: it is damaged, not ours, from a later version, or cannot be
            written. Nothing is changed then.
    """
    try:
        connection = sqlite3.connect(path, isolation_level=None)
    except sqlite3.Error as error:
        raise _unusable(path, str(error)) from error
    try:
        _check(connection, path, len(migrations))
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise _unusable(path, f"its file system supports no write-ahead log ({mode})")
        connection.execute("PRAGMA synchronous = FULL")
        _migrate(connection, migrations)
    except sqlite3.Error as error:
        connection.close()
        raise _unusable(path, str(error)) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection, path: Path, newest: int) -> None:
    faults = [row[0] for row in connection.execute("PRAGMA integrity_check(3)")]
    if faults != ["ok"]:
        raise _unusable(path, f"it is damaged ({faults[0].splitlines()[-1]})")
    version = _pragma(connection, "user_version")
    is_new = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    if not is_new and _pragma(connection, "application_id") != _APPLICATION_ID:
        raise _unusable(path, "it is the database of another program")
    if version > newest:
        raise _unusable(path, f"its schema is version {version}, this program's {newest}")


def _migrate(connection: sqlite3.Connection, migrations: Sequence[Sequence[str]]) -> None:
    for version in range(_pragma(connection, "user_version"), len(migrations)):
        connection.execute("BEGIN IMMEDIATE")
        for statement in migrations[version]:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {version + 1}")
        connection.execute("COMMIT")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value


def _unusable(path: Path, reason: str) -> StartupError:
    return StartupError(
        f"cannot use the batch database {path}: {reason}; restore it, move it away, or name"
        " another --coserve-data-dir"
    )


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
        self._path = path
        self._thread = thread
        self._connection = connection
        self._make_room = make_room

    @classmethod
    async def open(cls, path: Path, make_room: Callable[[], None] = lambda: None) -> Store:
        """Open the database at ``path``, or make it.

        ``make_room`` is called when the disk is full, before a transaction is tried once more.

        Raises:
            StartupError: see ``open_database``.
        """
        thread = WorkerThreads("coserve-store", 1)
        try:
            return cls(path, thread, await thread.run(open_database, path), make_room)
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
        except sqlite3.Error as error:
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
