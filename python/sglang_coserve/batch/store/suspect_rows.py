"""The rows of lines that the engine had when it died, until their batches end."""

from __future__ import annotations

import sqlite3

from sglang_coserve.lines.engine_lines import LastRun

__all__ = ["count_death", "known"]


def count_death(connection: sqlite3.Connection, last_run: LastRun) -> None:
    """Count the death of the engine against the lines that it had. Once: again changes nothing.

    When one of them was suspected before, it was being served without the others' company,
    and the death is put down to it alone.
    """
    query = "SELECT 1 FROM suspects WHERE last_run = ?"
    if connection.execute(query, (last_run.id,)).fetchone() is not None:
        return
    before = known(connection)
    again = [
        (batch_id, line) for batch_id, line in last_run.lines if line in before.get(batch_id, {})
    ]
    connection.executemany(
        "INSERT INTO suspects (batch_id, line, deaths, last_run) VALUES (?, ?, 1, ?)"
        " ON CONFLICT DO UPDATE SET deaths = deaths + 1, last_run = excluded.last_run",
        [(batch_id, line, last_run.id) for batch_id, line in again or last_run.lines],
    )


def known(connection: sqlite3.Connection) -> dict[str, dict[int, int]]:
    """Return by batch how often the engine has died of each line; of unfinished batches only."""
    connection.execute(
        "DELETE FROM suspects WHERE batch_id NOT IN (SELECT id FROM batches WHERE status IN"
        " ('validating', 'in_progress', 'finalizing', 'cancelling'))"
    )
    found: dict[str, dict[int, int]] = {}
    rows = connection.execute("SELECT batch_id, line, deaths FROM suspects ORDER BY line")
    for batch_id, line, deaths in rows:
        found.setdefault(batch_id, {})[line] = deaths
    return found
