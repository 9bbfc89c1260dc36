"""The schema, as the steps that lead to it. A released step is never changed."""

from __future__ import annotations

from typing import Final

__all__ = ["MIGRATIONS"]

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
)
"""Step ``n`` takes a database from version ``n`` to ``n + 1``."""
