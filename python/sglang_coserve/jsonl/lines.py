"""A file cut into lines, the ids met in it, and an order of its lines, whatever its size.

In the order common beginnings come together: the requests that begin with the same 128 bytes are a
group. Groups come in the order of their first lines, so lines without anything in common stay in
theirs; within a group come those together that have more in common.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import starmap
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO, Final, NamedTuple
from zlib import crc32

from sglang_coserve.errors import StorageError
from sglang_coserve.jsonl.request_line import KEY_BLOCK_BYTES, prefix_key

UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
"""How a file begins that is not UTF-8."""

UTF8_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 20


class FileLine(NamedTuple):
    """One line as it stands in the file."""

    number: int
    """1-based; blank lines count."""

    offset: int
    """Where it begins, in bytes."""

    size_bytes: int
    """Length in the file, line ending included."""

    content: bytes | None
    """The line without its line ending; None when it is longer than allowed."""


def read_lines(
    file: BinaryIO, max_line_bytes: int, *, after_line: int = 0, offset: int = 0
) -> Iterator[FileLine]:
    """Yield the lines of ``file`` from where it stands: at ``offset``, after line ``after_line``.

    A UTF-8 byte order mark, CRLF endings and a last line without an ending are
    accepted. Memory is bounded by ``max_line_bytes``: what is longer is skipped.
    """
    number = after_line
    while piece := file.readline(max_line_bytes + 1):
        number += 1
        size_bytes = len(piece)
        content: bytes | None = None
        if size_bytes > max_line_bytes and not piece.endswith(b"\n"):
            while not piece.endswith(b"\n") and (piece := file.readline(_SKIP_BYTES)):
                size_bytes += len(piece)
        else:
            content = _without_ending(piece.removeprefix(UTF8_BOM) if number == 1 else piece)
        yield FileLine(number, offset, size_bytes, content)
        offset += size_bytes


def is_blank(content: bytes | None) -> bool:
    """Return True for a line of nothing but white space, which asks for nothing."""
    return content is not None and not content.strip()


def _without_ending(piece: bytes) -> bytes:
    if not piece.endswith(b"\n"):
        return piece
    return piece[:-2] if piece.endswith(b"\r\n") else piece[:-1]


def _scratch_database(schema: str, *, in_memory: bool = False) -> sqlite3.Connection:
    """Return a database within a transaction, in SQLite's temporary folder or in memory.

    It is gone when it is closed. Each of its tables and sorts has a cache of 16 MiB.
    """
    database = sqlite3.connect(":memory:" if in_memory else "", isolation_level=None)
    for setting in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -16384"):
        database.execute(f"PRAGMA {setting}")
    database.execute(schema)
    database.execute("BEGIN")
    return database


class SeenIds:
    """An insert-only set of strings in bounded memory.

    A 128-bit hash per string in a nameless SQLite database: about 23 bytes a string in SQLite's
    temporary folder (gone with the process, however it ends) and a fixed 16 MiB cache, against
    about 100 bytes of memory for a Python set of the same hashes. One insertion takes a few
    microseconds. A database in memory takes about 40 bytes a string.
    """

    def __init__(self, *, in_memory: bool = False) -> None:
        """Start empty."""
        schema = "CREATE TABLE seen (hash BLOB PRIMARY KEY) WITHOUT ROWID"
        self._db = _scratch_database(schema, in_memory=in_memory)

    def add(self, text: str) -> bool:
        """Add ``text``; return False when it was there already.

        Raises:
            StorageError: SQLite's temporary folder is full or failing.
        """
        key = blake2b(text.encode(), digest_size=16).digest()
        try:
            return self._db.execute("INSERT OR IGNORE INTO seen VALUES (?)", (key,)).rowcount == 1
        except sqlite3.OperationalError as error:
            raise StorageError(
                f"the ids of the lines cannot be kept: {error}; set SQLITE_TMPDIR to a folder with"
                " room"
            ) from error


SCRATCH_BYTES: Final = 300
"""Most bytes that one line takes in the temporary folder and in the order."""

_ENTRY: Final = Struct("<QI")
"""Offset and number of a line. Before the first comes how many there are, and a CRC-32 of all."""

_FIRST_CHECKSUM: Final = crc32(b"coserve order")
"""Not 0: zeros are no order."""

_READ_BYTES: Final = 1 << 20
_AT_ONCE: Final = 10_000


class PrefixSorter:
    """Finds the order in bounded memory: SQLite sorts, in its temporary folder, up to 268 bytes a
    line."""

    def __init__(self) -> None:
        # With a table and two sorts 1,000,000 lines take 75 MiB and 6.4 s of CPU; with 64 MiB for
        # each instead of 16, 149 MiB and 6.7 s.
        self._database = _scratch_database(
            "CREATE TABLE lines (head BLOB, key BLOB, offset INTEGER, number INTEGER)"
        )

    def add(self, line: FileLine, body: Mapping[str, Any]) -> None:
        """Add a line that asks for ``body``."""
        key = prefix_key(body)
        row = (key[:KEY_BLOCK_BYTES], key, line.offset, line.number)
        self._database.execute("INSERT INTO lines VALUES (?, ?, ?, ?)", row)

    def write(self, order: BinaryIO) -> None:
        """Write the order of what was added. O(n log n) of the lines."""
        found = self._database.execute(
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

    def close(self) -> None:
        """Drop what was added."""
        self._database.close()


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


def read_order(order: BinaryIO, start: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield offset and number of ``count`` lines of a whole order from the ``start``-th on, fewer
    at the end. They are read at once."""
    order.seek((1 + start) * _ENTRY.size)
    return _ENTRY.iter_unpack(order.read(count * _ENTRY.size))
