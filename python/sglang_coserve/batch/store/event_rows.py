"""The outbox: ends of batches that are still to be delivered."""

from __future__ import annotations

import sqlite3
from typing import Final

from sglang_coserve.batch.record import BatchEvent

__all__ = ["count", "due", "insert", "postpone", "settle"]

_COLUMNS: Final = ("id", "type", "batch_id", "owner", "created_at_s", "attempts")


def insert(connection: sqlite3.Connection, event: BatchEvent) -> None:
    """Add an event, due at once."""
    connection.execute(
        "INSERT INTO events (id, type, batch_id, owner, created_at_s, attempts, due_at_s)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (*(getattr(event, name) for name in _COLUMNS), event.created_at_s),
    )


def due(connection: sqlite3.Connection, now_s: float, limit: int) -> list[BatchEvent]:
    """Return events that are due, the oldest first."""
    rows = connection.execute(
        f"SELECT {', '.join(_COLUMNS)} FROM events WHERE due_at_s <= ? ORDER BY seq LIMIT ?",
        (now_s, limit),
    )
    return [BatchEvent(**dict(zip(_COLUMNS, row, strict=True))) for row in rows]


def count(connection: sqlite3.Connection) -> int:
    """Return the number of undelivered events, due or not."""
    number: int = connection.execute("SELECT count(*) FROM events").fetchone()[0]
    return number


def postpone(connection: sqlite3.Connection, event_id: str, due_at_s: float) -> None:
    """Count a failed delivery; the event is due again at ``due_at_s``."""
    connection.execute(
        "UPDATE events SET attempts = attempts + 1, due_at_s = ? WHERE id = ?",
        (due_at_s, event_id),
    )


def settle(connection: sqlite3.Connection, event_id: str) -> None:
    """Forget an event."""
    connection.execute("DELETE FROM events WHERE id = ?", (event_id,))
