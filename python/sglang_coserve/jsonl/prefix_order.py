"""The process that finds an order of a file's lines in which common beginnings come together.

``python -m sglang_coserve.jsonl.prefix_order PARENT ORDER`` reads standard input and writes
``ORDER``, which ``read_order`` reads. Memory is bounded, whatever the file: SQLite sorts, in its
temporary folder, up to 268 bytes a line. The process ends with its parent, whose id it is given:
that may have ended before it could look.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import starmap
from pathlib import Path
from struct import Struct
from typing import BinaryIO, Final, NamedTuple
from zlib import crc32

from sglang_coserve.durable_files import replace
from sglang_coserve.jsonl.lines import is_blank, read_lines
from sglang_coserve.jsonl.request_line import parse_json, prefix_key

_ENTRY: Final = Struct("<QI")
"""Offset and number of a line. Before the first comes how many there are, and a CRC-32 of all."""

_FIRST_CHECKSUM: Final = crc32(b"coserve order")
"""Not 0: zeros are no order."""

_READ_BYTES: Final = 1 << 20
_AT_ONCE: Final = 10_000
_MAX_LINE_BYTES: Final = 1 << 30
_PARENT_POLL_S: Final = 1.0


class OrderedLine(NamedTuple):
    """Where a line is."""

    offset: int
    number: int


def write_order(source: BinaryIO, order: BinaryIO) -> None:
    """Find the order of ``source``, from where it stands, and write it to ``order``.

    The requests that begin with the same 128 bytes are a group. Groups come in the order
    of their first lines, so lines without anything in common stay in theirs; within
    a group come those together that have more in common. Blank lines are left out. O(n log n) of
    the lines.

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
        order.write(bytes(_ENTRY.size))
        count, checksum = 0, _FIRST_CHECKSUM
        while entries := found.fetchmany(_AT_ONCE):
            content = b"".join(starmap(_ENTRY.pack, entries))
            order.write(content)
            count, checksum = count + len(entries), crc32(content, checksum)
        order.seek(0)
        order.write(_ENTRY.pack(count, checksum))


def has_order(path: Path) -> bool:
    """Return whether a whole order is at ``path``. Blocks, and reads it: 12 bytes a line."""
    try:
        with path.open("rb") as order:
            head = order.read(_ENTRY.size)
            found_bytes, found = 0, _FIRST_CHECKSUM
            while content := order.read(_READ_BYTES):
                found_bytes, found = found_bytes + len(content), crc32(content, found)
    except OSError:
        return False
    if len(head) < _ENTRY.size:
        return False
    count, checksum = _ENTRY.unpack(head)
    return (count * _ENTRY.size, checksum) == (found_bytes, found)


def read_order(order: BinaryIO, start: int, count: int) -> Iterator[OrderedLine]:
    """Yield ``count`` entries of a whole order from the ``start``-th on, fewer at the end. They are
    read at once."""
    order.seek((1 + start) * _ENTRY.size)
    return starmap(OrderedLine, _ENTRY.iter_unpack(order.read(count * _ENTRY.size)))


def _sorter() -> sqlite3.Connection:
    database = sqlite3.connect("", isolation_level=None)
    # 16 MiB for each of a table and two sorts: 1,000,000 lines take 75 MiB and 6.4 s of CPU, and
    # with 64 MiB each 149 MiB and 6.7 s.
    for setting in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -16384"):
        database.execute(f"PRAGMA {setting}")
    database.execute("CREATE TABLE lines (head BLOB, key BLOB, offset INTEGER, number INTEGER)")
    database.execute("BEGIN")
    return database


def _keyed(source: BinaryIO) -> Iterator[tuple[bytes, bytes, int, int]]:
    for line in read_lines(source, _MAX_LINE_BYTES):
        if line.content is None or is_blank(line.content):
            continue
        key = b""  # Of what is no request: whoever serves it has something to say of it.
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            key = prefix_key(parse_json(line.content)["body"])
        yield key[:4], key, line.offset, line.number


def main(parent: str, name: str) -> None:
    """Order standard input, as the command line says."""
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    os.nice(10)  # Whatever serves requests is more urgent; with 19 a busy host never gets here.
    with open(0, "rb", buffering=_READ_BYTES) as source:
        replace(Path(name), partial(write_order, source))
    print("null")  # noqa: T201  (The caller reads JSON.)


def _end_with(parent: int) -> None:
    """End this process soon after the one that started it."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
