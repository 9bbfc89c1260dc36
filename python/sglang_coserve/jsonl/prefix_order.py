"""The process that finds an order of a file's lines in which common beginnings come together.

``python -m sglang_coserve.jsonl.prefix_order FILE ORDER`` writes ``ORDER``, which
``read_order`` reads. Memory is bounded, whatever the file: SQLite sorts, in its
temporary folder, up to 268 bytes a line.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import numpy as np
import orjson

from sglang_coserve.jsonl.lines import is_blank, read_lines
from sglang_coserve.jsonl.prefix_key import prefix_key

__all__ = ["OrderedLine", "main", "read_order", "write_order"]

_ENTRY: Final = np.dtype([("offset", "<u8"), ("number", "<u4")])
_READ_BYTES: Final = 1 << 20
_AT_ONCE: Final = 10_000
_MAX_LINE_BYTES: Final = 1 << 30


class OrderedLine(NamedTuple):
    """Where a line is."""

    offset: int
    number: int


def write_order(source: BinaryIO, order: Path) -> None:
    """Find the order of ``source``, from its beginning, and write it to ``order``, whole or not.

    The requests that begin with the same 128 bytes are a group. Groups come in the order
    of their first lines, so lines without anything in common stay in theirs; within
    a group come those together that have more in common. Lines that are no requests are left
    out. O(n log n) of the lines.

    Raises:
        OSError: the file cannot be read, or the order not be written.
    """
    with closing(_sorter()) as database:
        database.executemany("INSERT INTO lines VALUES (?, ?, ?, ?)", _keyed(source))
        found = database.execute(
            "SELECT offset, number FROM"
            " (SELECT *, MIN(number) OVER (PARTITION BY head) AS first FROM lines)"
            " ORDER BY first, key, number"
        )
        unfinished = order.with_name(f"{order.name}.part")
        unfinished.touch(mode=0o600)
        with unfinished.open("wb") as file:
            while entries := found.fetchmany(_AT_ONCE):
                file.write(np.array(entries, dtype=_ENTRY).tobytes())
        unfinished.replace(order)


def read_order(order: Path, start: int, count: int) -> list[OrderedLine]:
    """Return ``count`` entries from the ``start``-th on, fewer at the end."""
    entries = np.fromfile(order, dtype=_ENTRY, count=count, offset=start * _ENTRY.itemsize)
    return [OrderedLine(int(offset), int(number)) for offset, number in entries]


def _sorter() -> sqlite3.Connection:
    database = sqlite3.connect("", isolation_level=None)
    for setting in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -65536"):
        database.execute(f"PRAGMA {setting}")
    database.execute("CREATE TABLE lines (head BLOB, key BLOB, offset INTEGER, number INTEGER)")
    database.execute("BEGIN")
    return database


def _keyed(source: BinaryIO) -> Iterator[tuple[bytes, bytes, int, int]]:
    offset = 0
    for line in read_lines(source, _MAX_LINE_BYTES):
        begins_at, offset = offset, offset + line.size_bytes
        if line.content is None or is_blank(line.content):
            continue
        try:
            body = orjson.loads(line.content)["body"]
            key = prefix_key(body)
        except (ValueError, TypeError, KeyError, AttributeError):
            key = b""  # Whoever serves it has something to say of it.
        yield key[:4], key, begins_at, line.number


def main(arguments: Sequence[str] | None = None) -> None:
    """Order the file that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("order", type=Path)
    given = parser.parse_args(arguments)
    os.nice(19)  # Whatever serves requests is more urgent.
    with given.file.open("rb", buffering=_READ_BYTES) as file:
        write_order(file, given.order)
    print("null")  # noqa: T201  (The caller reads JSON.)


if __name__ == "__main__":
    main()
