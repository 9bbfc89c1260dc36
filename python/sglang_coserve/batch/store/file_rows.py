"""The rows of files."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Final

from sglang_coserve.batch.errors import ConflictError, NotFoundError
from sglang_coserve.batch.record import FileRecord
from sglang_coserve.batch.store import pages
from sglang_coserve.batch.store.records import decode, encode

UPLOAD: Final = "upload"
"""The purpose of an upload that is not complete; those of its parts begin with it. None of them is
listed."""

IS_UNFINISHED: Final = "ended_at_s IS NULL"
"""A condition on batches, as the index of unfinished ones has it."""

_USED_BY: Final = f"""
SELECT id FROM batches WHERE {IS_UNFINISHED}
AND :id IN (input_file_id, output_file_id, error_file_id)
"""


def insert(connection: sqlite3.Connection, file: FileRecord) -> None:
    """Add a file."""
    connection.execute("INSERT INTO files (record) VALUES (?)", (encode(file),))


def put_output(connection: sqlite3.Connection, file: FileRecord) -> None:
    """Add the output of a running batch, or note its new size and times."""
    connection.execute(
        "INSERT INTO files (record) VALUES (?)"
        " ON CONFLICT (id) DO UPDATE SET record = excluded.record",
        (encode(file),),
    )


def exists(connection: sqlite3.Connection, file_id: str) -> bool:
    """Return True when anybody has such a file."""
    found = connection.execute("SELECT 1 FROM files WHERE id = ?", (file_id,)).fetchone()
    return found is not None


def stored(connection: sqlite3.Connection, owner: str) -> tuple[int, int]:
    """Return the bytes and the number of all files of ``owner``. O(files of the owner)."""
    query = "SELECT coalesce(sum(size_bytes), 0), count(*) FROM files WHERE owner = ?"
    size_bytes, files = connection.execute(query, (owner,)).fetchone()
    return size_bytes, files


def find(
    connection: sqlite3.Connection,
    owner: str,
    file_id: str,
    now_s: float,
    *,
    purpose: str | None = None,
) -> FileRecord:
    """Return a file of ``owner``: of this ``purpose``, or of any but those of uploads.

    Raises:
        NotFoundError: there is none, or it has expired.
    """
    row = connection.execute(
        "SELECT record FROM files WHERE id = ? AND owner = ?"
        " AND (expires_at_s IS NULL OR expires_at_s > ?)"
        f" AND iif(? IS NULL, purpose NOT LIKE '{UPLOAD}%', purpose = ?)",
        (file_id, owner, now_s, purpose, purpose),
    ).fetchone()
    if row is None:
        raise _no_file(file_id)
    return decode(row[0], FileRecord)


def with_purpose(connection: sqlite3.Connection, owner: str, purpose: str) -> list[str]:
    """Return the ids of the files of ``owner`` that have this ``purpose``."""
    query = "SELECT id FROM files WHERE owner = ? AND purpose = ?"
    return [file_id for (file_id,) in connection.execute(query, (owner, purpose))]


def page(
    connection: sqlite3.Connection,
    owner: str,
    now_s: float,
    *,
    after: str | None,
    limit: int,
    is_ascending: bool,
    purpose: str | None,
) -> list[FileRecord]:
    """Return files of ``owner`` in the order of their creation; see ``pages.page``."""
    # The files of a response are seen through its object only.
    conditions = [
        f"owner = :owner AND purpose NOT LIKE '{UPLOAD}%' AND purpose <> 'response'",
        "(expires_at_s IS NULL OR expires_at_s > :now_s)",
        "coalesce(:purpose, purpose) = purpose",
    ]
    return pages.page(
        connection,
        "files",
        FileRecord,
        conditions,
        {"owner": owner, "now_s": now_s, "purpose": purpose},
        after=after,
        limit=limit,
        is_ascending=is_ascending,
    )


def delete(connection: sqlite3.Connection, owner: str, file_id: str) -> None:
    """Forget a file.

    Raises:
        NotFoundError: ``owner`` has no such file.
        ConflictError: an unfinished batch reads or writes it.
    """
    found = connection.execute(
        "SELECT 1 FROM files WHERE id = ? AND owner = ?", (file_id, owner)
    ).fetchone()
    if found is None:
        raise _no_file(file_id)
    user = connection.execute(_USED_BY, {"id": file_id}).fetchone()
    if user is not None:
        raise ConflictError(
            f"file {file_id} is in use by batch {user[0]}: cancel it, or wait for its end",
            code="file_in_use",
            param="file_id",
        )
    connection.execute("DELETE FROM files WHERE id = ?", (file_id,))


def expire(connection: sqlite3.Connection, file_ids: Iterable[str], now_s: float) -> None:
    """Have files expire now; an unknown one is passed over."""
    connection.executemany(
        "UPDATE files SET record = json_set(record, '$.expires_at_s', ?) WHERE id = ?",
        [(now_s, each) for each in file_ids],
    )


def expired(connection: sqlite3.Connection, now_s: float, limit: int) -> list[tuple[str, str]]:
    """Return (owner, id) of files to delete: past their expiry and in use by no batch."""
    rows = connection.execute(
        "SELECT owner, id FROM files WHERE expires_at_s <= ? AND NOT EXISTS ("
        + _USED_BY.replace(":id", "files.id").replace("SELECT id", "SELECT 1")
        + ") ORDER BY expires_at_s LIMIT ?",
        (now_s, limit),
    )
    return [(owner, file_id) for owner, file_id in rows]


def _no_file(file_id: str) -> NotFoundError:
    message = f"no such file: {file_id[:64]!r}"
    return NotFoundError(message, code="file_not_found", param="file_id")
