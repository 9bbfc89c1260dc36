"""Pages of lists, whose rows are in the order in which they were made."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

from sglang_coserve.batch.errors import NotFoundError
from sglang_coserve.batch.store.records import decode

_T = TypeVar("_T")

MOST_ROWS: Final = 1000
"""Most rows of a page. So many files take 4 ms, in which no other list is read. Rows that are not
of the page's purpose or status, or have expired, are parsed, too, before the next one is found:
100,000 of them take 0.1 s, and with an index of all these columns 0.07."""

_NAMES: Final = {"files": "file", "batches": "batch"}


def page(
    connection: sqlite3.Connection,
    table: Literal["files", "batches"],
    kind: type[_T],
    conditions: Sequence[str],
    values: Mapping[str, Any],
    *,
    after: str | None,
    limit: int,
    is_ascending: bool = False,
) -> list[_T]:
    """Return records of ``kind``, the newest first unless ``is_ascending``: up to ``limit``, but at
    most ``MOST_ROWS`` and one, which says that there are more.

    ``values`` are those of the variables in ``conditions``, and ``owner``, who is anybody if None.
    The list begins behind the record ``after``, which may be gone: the last 100,000 are known.

    Raises:
        NotFoundError: ``owner`` has no record ``after``, and had none of late.
    """
    sign, order = (">", "ASC") if is_ascending else ("<", "DESC")
    values = {**values, "after": after, "limit": min(limit, MOST_ROWS + 1)}
    if after is not None:
        owned = "id = :after AND coalesce(:owner, owner) = owner"
        place = connection.execute(
            f"SELECT seq FROM {table} WHERE {owned} UNION ALL SELECT seq FROM places WHERE {owned}",
            values,
        ).fetchone()
        if place is None:
            raise NotFoundError(
                f"no such {_NAMES[table]}: {after[:64]!r}: begin the list anew",
                code=f"{_NAMES[table]}_not_found",
                param="after",
            )
        conditions = [*conditions, f"seq {sign} :behind"]
        values["behind"] = place[0]
    rows = connection.execute(
        f"SELECT record FROM {table} WHERE {' AND '.join(conditions)}"
        f" ORDER BY seq {order} LIMIT :limit",
        values,
    )
    return [decode(record, kind) for (record,) in rows]
