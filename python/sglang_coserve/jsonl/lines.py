"""A file cut into lines, without ever holding more than one of them, and the ids met in it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from hashlib import blake2b
from typing import BinaryIO, NamedTuple

UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
"""How a file begins that is not UTF-8."""

_UTF8_BOM = b"\xef\xbb\xbf"
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

    digest: int
    """64-bit BLAKE2b of the line without its line ending, never 0; 0 when not asked for."""


def read_lines(
    file: BinaryIO,
    max_line_bytes: int,
    *,
    after_line: int = 0,
    offset: int = 0,
    with_digest: bool = False,
) -> Iterator[FileLine]:
    """Yield the lines of ``file`` from where it stands: at ``offset``, after line ``after_line``.

    A UTF-8 byte order mark, CRLF endings and a last line without an ending are
    accepted. Memory is bounded by ``max_line_bytes``: what is longer is hashed and dropped.
    """
    number = after_line
    while piece := file.readline(max_line_bytes + 1):
        number += 1
        size_bytes = len(piece)
        if number == 1:
            piece = piece.removeprefix(_UTF8_BOM)
        content: bytes | None = None
        hashed = blake2b(digest_size=8)
        if size_bytes > max_line_bytes and not piece.endswith(b"\n"):
            hashed.update(piece)
            while not piece.endswith(b"\n") and (piece := file.readline(_SKIP_BYTES)):
                size_bytes += len(piece)
                hashed.update(_without_ending(piece))
        else:
            content = _without_ending(piece)
            if with_digest:
                hashed.update(content)
        digest = (int.from_bytes(hashed.digest()) or 1) if with_digest else 0
        yield FileLine(number, offset, size_bytes, content, digest)
        offset += size_bytes


def is_blank(content: bytes | None) -> bool:
    """Return True for a line of nothing but white space, which asks for nothing."""
    return content is not None and not content.strip()


def _without_ending(piece: bytes) -> bytes:
    if not piece.endswith(b"\n"):
        return piece
    return piece[:-2] if piece.endswith(b"\r\n") else piece[:-1]


def scratch_database(schema: str) -> sqlite3.Connection:
    """Return a database in SQLite's temporary folder, gone when it is closed, within a transaction.

    Each of its tables and sorts has a cache of 16 MiB. One user at a time, in any thread.
    """
    database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    for setting in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -16384"):
        database.execute(f"PRAGMA {setting}")
    database.execute(schema)
    database.execute("BEGIN")
    return database


class SeenIds:
    """An insert-only set of strings in bounded memory.

    A 128-bit hash per string in a nameless SQLite database: about 23 bytes a
    string on disk (in SQLite's temporary folder, gone with the process, however
    it ends) and a fixed 16 MiB cache, against about 100 bytes of memory for a
    Python set of the same hashes. One insertion takes a few microseconds.
    """

    def __init__(self) -> None:
        # Whoever stops a reader closes this, in another thread.
        self._db = scratch_database("CREATE TABLE seen (hash BLOB PRIMARY KEY) WITHOUT ROWID")

    def add(self, text: str) -> bool:
        """Add ``text``; return False when it was there already."""
        key = blake2b(text.encode(), digest_size=16).digest()
        return self._db.execute("INSERT OR IGNORE INTO seen VALUES (?)", (key,)).rowcount == 1

    def close(self) -> None:
        """Drop the set and its temporary file."""
        self._db.close()
