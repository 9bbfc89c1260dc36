"""Opens the database: checked, durable, and at this version's schema."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sglang_coserve.batch.store.migrations import MIGRATIONS
from sglang_coserve.errors import StartupError, StorageError

__all__ = ["open_database", "transaction"]

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


@contextmanager
def transaction(connection: sqlite3.Connection, path: Path) -> Generator[None]:
    """Run what is done within it as one transaction.

    Raises:
        StorageError: the database at ``path`` cannot be read or written.
    """
    try:
        connection.execute("BEGIN")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            # A full disk makes SQLite roll back by itself.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    except sqlite3.Error as error:
        raise StorageError(f"the batch database {path} failed: {error}") from error


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
