"""The data of forecasts: rates by the hour, and batches that had a forecast."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from sglang_coserve.batch.forecast_errors import REMEMBERED, PastJob
from sglang_coserve.batch.rate_forecast import ServedTokens

__all__ = ["hours", "past", "put_hours", "void_unfinished"]


def put_hours(
    connection: sqlite3.Connection, served: Mapping[int, ServedTokens], oldest: int
) -> None:
    """Set what was served in these hours since the epoch; forget those before ``oldest``."""
    connection.executemany(
        "INSERT OR REPLACE INTO served_hours (hour, tokens, busy_s) VALUES (?, ?, ?)",
        [(hour, each.tokens, each.busy_s) for hour, each in served.items()],
    )
    connection.execute("DELETE FROM served_hours WHERE hour < ?", (oldest,))


def hours(connection: sqlite3.Connection) -> dict[int, ServedTokens]:
    """Return what was served, by the hour since the epoch."""
    rows = connection.execute("SELECT hour, tokens, busy_s FROM served_hours")
    return {hour: ServedTokens(tokens, busy_s) for hour, tokens, busy_s in rows}


def past(connection: sqlite3.Connection) -> list[tuple[PastJob, float, float]]:
    """Return the newest complete batches that had a forecast, the oldest first.

    With each the tokens that its lines took, and those that they were expected to take.
    """
    rows = connection.execute(
        "SELECT forecast_s, completed_at_s - created_at_s, input_tokens + output_tokens,"
        " finished_estimated_tokens FROM batches"
        " WHERE status = 'completed' AND forecast_s IS NOT NULL ORDER BY seq DESC LIMIT ?",
        (REMEMBERED,),
    ).fetchall()
    return [
        (PastJob(forecast_s, actual_s), tokens, expected)
        for forecast_s, actual_s, tokens, expected in reversed(rows)
    ]


def void_unfinished(connection: sqlite3.Connection) -> None:
    """Forget the forecasts of unfinished batches: the server was down meanwhile."""
    connection.execute(
        "UPDATE batches SET forecast_s = NULL WHERE forecast_s IS NOT NULL AND"
        " status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"
    )
