"""The rows of batches, of their events, and of lines that the engine has died of.

An event says that a batch has ended, and stays until it is delivered. A line is suspected that the
engine had when it died, until its batch ends.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Final

from sglang_coserve.batch.errors import ConflictError, NotFoundError, TooManyError
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.record import BatchEvent, FileRecord, JobRecord, Status
from sglang_coserve.batch.state import Event, Failed, Finalized, Progressed, transition
from sglang_coserve.batch.store import file_rows, pages
from sglang_coserve.batch.store.file_rows import IS_UNFINISHED
from sglang_coserve.batch.store.records import decode, encode
from sglang_coserve.lines.engine_lines import LastRun
from sglang_coserve.web.errors import ApiError

_SELECT: Final = "SELECT record FROM batches"


def create(
    connection: sqlite3.Connection, record: JobRecord, limits: BatchLimits, free_bytes: int
) -> tuple[JobRecord, bool]:
    """Add a batch, if ``find_earlier`` permits it; return it and True, or an earlier one and False.

    See ``find_earlier`` for the arguments, and for what is raised.
    """
    earlier = find_earlier(connection, record, limits, free_bytes)
    if earlier is not None:
        return earlier, False
    connection.execute("INSERT INTO batches (record) VALUES (?)", (encode(record),))
    _delete_surplus(connection, record, limits)
    return record, True


def _delete_surplus(connection: sqlite3.Connection, new: JobRecord, limits: BatchLimits) -> None:
    """Delete the oldest ended batches and responses of an owner who has too many beside ``new``.

    O(ended batches of the owner).
    """
    theirs = "owner = :owner AND ended_at_s IS NOT NULL"
    values = {
        "owner": new.owner,
        "most": limits.max_ended_batches_per_owner,
        "most_bytes": limits.max_ended_bytes_per_owner,
    }
    number, size_bytes = connection.execute(
        f"SELECT count(*), coalesce(sum(row_bytes), 0) FROM batches WHERE {theirs}", values
    ).fetchone()
    if number <= limits.max_ended_batches_per_owner and (
        size_bytes <= limits.max_ended_bytes_per_owner
    ):
        return
    surplus = connection.execute(
        "SELECT seq FROM (SELECT seq, row_number() OVER newer AS number,"
        f" sum(row_bytes) OVER newer AS size_bytes FROM batches WHERE {theirs}"
        " WINDOW newer AS (ORDER BY seq DESC))"
        " WHERE number > :most OR size_bytes > :most_bytes",
        values,
    )
    for (seq,) in surplus.fetchall():
        (ended,) = _found(connection.execute(f"{_SELECT} WHERE seq = ?", (seq,)))
        _delete(connection, ended, new.created_at_s)


def find_earlier(
    connection: sqlite3.Connection, record: JobRecord, limits: BatchLimits, free_bytes: int
) -> JobRecord | None:
    """Return an earlier batch with the key of ``record``; None if there is none, and it may begin.

    Args:
        connection: Of the database.
        record: A new batch.
        limits: Of batches and files.
        free_bytes: Of the disk.

    Raises:
        NotFoundError: the owner has no such input file.
        ApiError: the file is no input.
        ConflictError: the key was used for another request.
        TooManyError: there are as many unfinished batches as allowed.
        QuotaError: the owner has too much on the disk.
        StorageError: the disk is full.
    """
    earlier = find_repeated(connection, record)
    if earlier is not None:
        return earlier
    file = file_rows.find(connection, record.owner, record.input_file_id, record.created_at_s)
    is_batch = record.response is None
    if file.purpose != ("batch" if is_batch else "response"):
        raise ApiError(
            f"file {file.id} has the purpose {file.purpose!r}: a batch needs purpose 'batch'",
            code="invalid_file_purpose",
            param="input_file_id",
        )
    query = (
        "SELECT count(*), count(*) FILTER (WHERE owner = ?) FROM batches"
        f" WHERE {IS_UNFINISHED} AND is_response = ?"
    )
    of_all, of_owner = connection.execute(query, (record.owner, not is_batch)).fetchone()
    kind, most, most_of_owner = "responses", limits.max_active_responses, None
    if is_batch:
        kind, most = "batches", limits.max_active_batches
        most_of_owner = limits.max_active_batches_per_owner
    free = most - of_all
    if free <= 0 or of_owner >= (free if most_of_owner is None else most_of_owner):
        raise TooManyError(
            f"{of_owner} {kind} of this key are unfinished, and {free} more could be of all keys:"
            " wait for one of them, or cancel it",
            code=f"too_many_{kind}",
        )
    used_bytes, files = file_rows.stored(connection, record.owner)
    # Results are files, too: two of each batch at the most.
    limits.check_stored(used_bytes, files + 2, free_bytes)
    return None


def find_repeated(connection: sqlite3.Connection, record: JobRecord) -> JobRecord | None:
    """Return the batch with the idempotency key of ``record``; None without one.

    Raises:
        ConflictError: the key was used for another request.
    """
    query = f"{_SELECT} WHERE owner = ? AND idempotency_key = ?"
    found = _found(connection.execute(query, (record.owner, record.idempotency_key)))
    if not found:
        return None
    (earlier,) = found
    if earlier.fingerprint != record.fingerprint:
        raise ConflictError(
            f"the idempotency key {record.idempotency_key!r} was used for another request,"
            f" batch {earlier.id}: use a new key",
            code="idempotency_conflict",
            param="Idempotency-Key",
        )
    return earlier


def find(connection: sqlite3.Connection, batch_id: str, owner: str | None = None) -> JobRecord:
    """Return a batch: of ``owner``, or of anybody when that is None.

    Raises:
        NotFoundError: there is none.
    """
    found = _found(connection.execute(f"{_SELECT} WHERE id = ?", (batch_id,)))
    if not found or owner not in (None, found[0].owner):
        raise NotFoundError(
            f"no such batch: {batch_id[:64]!r}", code="batch_not_found", param="batch_id"
        )
    return found[0]


def find_response(connection: sqlite3.Connection, batch_id: str, owner: str) -> JobRecord:
    """Return the batch behind a response of ``owner``.

    Raises:
        NotFoundError: there is none.
    """
    query = f"{_SELECT} WHERE id = ? AND owner = ? AND is_response"
    found = _found(connection.execute(query, (batch_id, owner)))
    if not found:
        raise NotFoundError(
            "no such response: it was deleted, has expired, or belongs to another key",
            code="response_not_found",
            param="response_id",
        )
    return found[0]


def delete_response(
    connection: sqlite3.Connection, batch_id: str, owner: str, now_s: float
) -> None:
    """Forget a response of ``owner``; its files expire now.

    Raises:
        NotFoundError: there is none.
        ConflictError: it has not ended.
    """
    record = find_response(connection, batch_id, owner)
    if not record.status.is_final:
        raise ConflictError(
            "the response has not ended: cancel it first", code="response_not_ended"
        )
    _delete(connection, record, now_s)


def delete_old(
    connection: sqlite3.Connection, ended_by_s: float, now_s: float, *, are_responses: bool
) -> bool:
    """Forget batches or responses that had ended by then, a thousand at the most.

    Returns True while there are more.
    """
    query = f"{_SELECT} WHERE is_response = ? AND ended_at_s <= ? LIMIT ?"
    found = _found(connection.execute(query, (are_responses, ended_by_s, pages.MOST_ROWS)))
    for record in found:
        _delete(connection, record, now_s)
    return len(found) == pages.MOST_ROWS


def _delete(connection: sqlite3.Connection, record: JobRecord, now_s: float) -> None:
    """Forget a batch, whose files stay, or a response, whose files expire now."""
    connection.execute("DELETE FROM batches WHERE id = ?", (record.id,))
    if record.response is not None:
        files = (record.input_file_id, record.output_file_id, record.error_file_id)
        file_rows.expire(connection, files, now_s)


def page(
    connection: sqlite3.Connection,
    owner: str | None,
    *,
    after: str | None,
    limit: int,
    status: str | None = None,
) -> list[JobRecord]:
    """Return batches of ``owner``, or batches and responses of all; see ``pages.page``."""
    conditions = ["coalesce(:status, status) = status"]
    if owner is not None:
        conditions.append("owner = :owner AND is_response = 0")
    values = {"owner": owner, "status": status}
    return pages.page(
        connection, "batches", JobRecord, conditions, values, after=after, limit=limit
    )


def unfinished(connection: sqlite3.Connection) -> list[JobRecord]:
    """Return the batches that are in no final state, the oldest first."""
    return _found(connection.execute(f"{_SELECT} WHERE {IS_UNFINISHED} ORDER BY seq"))


def apply(
    connection: sqlite3.Connection,
    batch_id: str,
    event: Event,
    now_s: float,
    *,
    owner: str | None = None,
    expected: Status | None = None,
    outbox_id: str | None = None,
) -> JobRecord:
    """Take a batch through one transition, its files and its outbox event with it.

    Nothing happens when ``expected`` is given and the batch is in another state.
    ``outbox_id`` is the id of the event to record should the batch end now.

    Raises:
        NotFoundError: there is no such batch of ``owner``.
        ConflictError: see ``transition``.
    """
    before = find(connection, batch_id, owner)
    if expected not in (None, before.status):
        return before
    after = transition(before, event, now_s)
    if after == before:
        return before
    connection.execute("UPDATE batches SET record = ? WHERE id = ?", (encode(after), batch_id))
    if isinstance(event, Progressed | Finalized | Failed):
        _put_outputs(connection, after, now_s)
    if after.status.is_final and after.response is not None:
        file_rows.expire(connection, (after.input_file_id,), now_s)
    elif after.status.is_final and outbox_id is not None:
        end = BatchEvent(
            id=outbox_id,
            type=f"batch.{after.status}",
            batch_id=batch_id,
            created_at_s=now_s,
            due_at_s=now_s,
        )
        connection.execute("INSERT INTO events (record) VALUES (?)", (encode(end),))
    return after


def add_online_delays(connection: sqlite3.Connection, added_s: Mapping[str, float]) -> None:
    """Add to what batches have delayed online requests by; an unknown batch is passed over."""
    connection.executemany(
        "UPDATE batches SET record = json_set(record, '$.online_delay_s',"
        " coalesce(json_extract(record, '$.online_delay_s'), 0) + ?) WHERE id = ?",
        [(seconds, batch_id) for batch_id, seconds in added_s.items()],
    )


def _put_outputs(connection: sqlite3.Connection, batch: JobRecord, now_s: float) -> None:
    """Note what the output and error files hold. They live from when they are complete."""
    after_s = batch.output_expires_after_s
    expires_at_s = now_s + after_s if after_s is not None and batch.status.is_final else None
    for file_id, size_bytes, kind in (
        (batch.output_file_id, batch.progress.output_bytes, "output"),
        (batch.error_file_id, batch.progress.error_bytes, "error"),
    ):
        if size_bytes:
            file_rows.put_output(
                connection,
                FileRecord(
                    id=file_id,
                    owner=batch.owner,
                    filename=f"{batch.id}_{kind}.jsonl",
                    purpose="batch_output" if batch.response is None else "response",
                    size_bytes=size_bytes,
                    created_at_s=now_s,
                    expires_at_s=expires_at_s,
                ),
            )


def move_owner(connection: sqlite3.Connection, owner: str, to: str) -> tuple[int, int]:
    """Give all that ``owner`` has to another one; return how many files and batches.

    Idempotency keys that the other one has used are forgotten.
    """
    values = {"owner": owner, "to": to}
    if owner == to:
        return 0, 0
    connection.execute(
        "UPDATE batches SET record = json_set(record, '$.idempotency_key', NULL)"
        " WHERE owner = :owner AND idempotency_key IN"
        " (SELECT idempotency_key FROM batches WHERE owner = :to)",
        values,
    )
    files, batches = (
        connection.execute(
            f"UPDATE {table} SET record = json_set(record, '$.owner', :to) WHERE owner = :owner",
            values,
        ).rowcount
        for table in ("files", "batches")
    )
    connection.execute("UPDATE places SET owner = :to WHERE owner = :owner", values)
    return files, batches


def due_events(connection: sqlite3.Connection, now_s: float, limit: int) -> list[BatchEvent]:
    """Return events that are to be delivered now, the oldest first."""
    query = "SELECT record FROM events WHERE due_at_s <= ? ORDER BY seq LIMIT ?"
    rows = connection.execute(query, (now_s, limit))
    return [decode(record, BatchEvent) for (record,) in rows]


def count_events(connection: sqlite3.Connection) -> int:
    """Return the number of undelivered events, due or not."""
    number: int = connection.execute("SELECT count(*) FROM events").fetchone()[0]
    return number


def postpone_event(connection: sqlite3.Connection, event_id: str, due_at_s: float) -> None:
    """Count a failed delivery; the event is due again at ``due_at_s``."""
    connection.execute(
        "UPDATE events SET record = json_set(record, '$.due_at_s', ?,"
        " '$.attempts', json_extract(record, '$.attempts') + 1) WHERE id = ?",
        (due_at_s, event_id),
    )


def settle_event(connection: sqlite3.Connection, event_id: str) -> None:
    """Forget an event."""
    connection.execute("DELETE FROM events WHERE id = ?", (event_id,))


def count_death(connection: sqlite3.Connection, last_run: LastRun) -> None:
    """Count the death of the engine against the lines that it had. Once: again changes nothing.

    When one of them was suspected before, it was being served without the others' company,
    and the death is put down to it alone.
    """
    query = "SELECT 1 FROM suspects WHERE last_run = ?"
    if connection.execute(query, (last_run.id,)).fetchone() is not None:
        return
    before = suspects(connection)
    again = [
        (batch_id, line) for batch_id, line in last_run.lines if line in before.get(batch_id, {})
    ]
    connection.executemany(
        "INSERT INTO suspects (batch_id, line, deaths, last_run) VALUES (?, ?, 1, ?)"
        " ON CONFLICT DO UPDATE SET deaths = deaths + 1, last_run = excluded.last_run",
        [(batch_id, line, last_run.id) for batch_id, line in again or last_run.lines],
    )


def suspects(connection: sqlite3.Connection) -> dict[str, dict[int, int]]:
    """Return by batch how often the engine has died of each line; of unfinished batches only."""
    connection.execute(
        f"DELETE FROM suspects WHERE batch_id NOT IN (SELECT id FROM batches WHERE {IS_UNFINISHED})"
    )
    found: dict[str, dict[int, int]] = {}
    rows = connection.execute("SELECT batch_id, line, deaths FROM suspects ORDER BY line")
    for batch_id, line, deaths in rows:
        found.setdefault(batch_id, {})[line] = deaths
    return found


def _found(rows: Iterable[tuple[str]]) -> list[JobRecord]:
    return [decode(record, JobRecord) for (record,) in rows]
