"""Journals the generated tokens of unfinished lines, so that a crash loses little work."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from pathlib import Path
from typing import Final
from zlib import crc32

from sglang_coserve.disk_room import NO_ROOM, no_bound
from sglang_coserve.durable_files import discard, replace, write_all
from sglang_coserve.errors import disk_errors
from sglang_coserve.lines.background import WorkerThreads
from sglang_coserve.lines.line_source import LineBitmap

_MAGIC: Final = b"coserve journal 1\n"
_HEADER: Final = struct.Struct("<III")
"""Line number, number of tokens, CRC-32 of the two and of the tokens."""

_MAX_ENTRY_TOKENS: Final = 1 << 24


class LineTokens:
    """The tokens of unfinished lines, in memory."""

    def __init__(self, model: str) -> None:
        self.model = model
        """What generated them, which alone can continue them."""

        self.has_grown = asyncio.Event()
        """Set with every token that comes; for who saves them to clear."""

        self._tokens = _no_tokens()

    def tokens(self, line: int) -> tuple[int, ...]:
        """Return the tokens generated for ``line`` so far."""
        return tuple(self._tokens.get(line, ()))

    def add(self, line: int, tokens: Sequence[int]) -> None:
        """Append ``tokens`` to those generated for ``line`` so far."""
        self._tokens[line].extend(tokens)
        self.has_grown.set()

    def drop(self, line: int) -> None:
        """Remove a line that is finished or has to start over."""
        self._tokens.pop(line, None)

    async def save(self, threads: WorkerThreads) -> None:
        """Write what is new to the disk, where the tokens are kept."""


class TokenJournal(LineTokens):
    """The tokens of one batch's unfinished lines, in memory and in an append-only file.

    An entry holds the tokens that follow those of the line's earlier entries. The file
    is synced only when it is rewritten: entries survive a crash of the process at once and of the
    machine after some seconds; lost tokens are only computed again. Tokens can be continued only by
    the model that generated them, which the file identifies. Methods raise ``StorageError`` when
    the disk is failing.

    A journal gives way to all else on the disk. It does not grow while there is no room, and
    anybody may delete its file at any time: the next write makes a whole one.
    """

    def __init__(
        self,
        path: Path,
        model: str,
        compact_bytes: int,
        room: Callable[[int], AbstractContextManager[None]] = no_bound,
    ) -> None:
        """``room`` is entered to write so many bytes; it raises OSError when there is none."""
        super().__init__(model)
        self._path = path
        self._head = _MAGIC + blake2b(model.encode(), digest_size=16).digest()
        self._compact_bytes = compact_bytes
        self._room = room
        self._size_bytes = 0
        self._is_whole = True
        """False once the file lacks tokens that are not in ``_unwritten``."""

        self._unwritten = _no_tokens()

    def load(self, finished: LineBitmap) -> int:
        """Read the file, without ``finished`` lines, and truncate an unfinished entry. Blocks.

        Returns the number of unfinished lines whose tokens were discarded, as another model
        generated them.
        """
        self._tokens.clear()
        self._unwritten.clear()
        self._size_bytes = 0
        self._is_whole = True
        with self._disk_errors():
            if not self._path.exists():
                return 0
            with self._path.open("r+b", buffering=1 << 20) as file:
                head = file.read(len(self._head))
                size_bytes = len(head)
                while (entry := _read_entry(file.read)) is not None:
                    line, tokens = entry
                    size_bytes += _HEADER.size + 4 * len(tokens)
                    if line not in finished:
                        self._tokens[line].extend(tokens)
                num_foreign = 0
                if head == self._head:
                    self._size_bytes = size_bytes
                else:
                    num_foreign = len(self._tokens)
                    self._tokens.clear()
                file.truncate(self._size_bytes)
                return num_foreign

    def add(self, line: int, tokens: Sequence[int]) -> None:
        """See ``LineTokens``."""
        super().add(line, tokens)
        self._unwritten[line].extend(tokens)

    def drop(self, line: int) -> None:
        """See ``LineTokens``."""
        super().drop(line)
        self._unwritten.pop(line, None)

    async def save(self, threads: WorkerThreads) -> None:
        """See ``LineTokens``; one call at a time."""
        if not self._unwritten:
            return
        # Asked before the bytes are put together: that takes time of the event loop.
        tokens = self._unwritten if self._is_whole else self._tokens
        if await threads.run(self._has_room, _size_bytes(tokens)):
            await threads.run(self.write, *self.take_unwritten())

    def take_unwritten(self) -> tuple[bytes, bool]:
        """Return the bytes for ``write``, and whether they replace the file.

        The file is rewritten when it is not whole, and when it is larger than ``compact_bytes``
        and most of it belongs to finished lines.
        """
        is_large = self._size_bytes > max(self._compact_bytes, 2 * _size_bytes(self._tokens))
        is_rewrite = is_large or not self._is_whole
        entries = self._tokens if is_rewrite else self._unwritten
        written = b"".join(_entry(line, tokens) for line, tokens in entries.items())
        self._unwritten.clear()
        if is_rewrite or not self._size_bytes:
            written = self._head + written
        self._size_bytes = len(written) + (0 if is_rewrite else self._size_bytes)
        return written, is_rewrite

    def write(self, written: bytes, is_rewrite: bool) -> None:
        """Write the result of ``take_unwritten``. Blocks; one call at a time."""
        self._is_whole = False
        with self._disk_errors():
            try:
                with self._room(len(written)):
                    if is_rewrite:
                        replace(self._path, lambda file: file.write(written))
                        self._is_whole = True
                    else:
                        self._is_whole = self._append(written)
            except OSError as error:
                if error.errno not in (*NO_ROOM, errno.ENOENT):
                    raise

    def _append(self, written: bytes) -> bool:
        """Return whether the file was still there, and has got all that is ``written``."""
        size_bytes = self._size_bytes - len(written)
        create = 0 if size_bytes else os.O_CREAT
        fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_APPEND | create, 0o600)
        try:
            if os.fstat(fd).st_size != size_bytes:
                return False
            write_all(fd, written)
        finally:
            os.close(fd)
        return True

    def _has_room(self, size_bytes: int) -> bool:
        with self._disk_errors():
            try:
                with self._room(size_bytes):
                    return True
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
        return False

    def delete(self) -> None:
        """Delete the file, when all lines are finished. Blocks."""
        with self._disk_errors():
            discard(self._path)

    def _disk_errors(self) -> AbstractContextManager[None]:
        return disk_errors(f"the journal {self._path} failed")


def _no_tokens() -> defaultdict[int, array[int]]:
    return defaultdict(lambda: array("I"))


def _size_bytes(tokens: Mapping[int, array[int]]) -> int:
    return sum(_HEADER.size + 4 * len(of_line) for of_line in tokens.values())


def _entry(line: int, tokens: array[int]) -> bytes:
    content = tokens.tobytes()
    return _HEADER.pack(line, len(tokens), _checksum(line, len(tokens), content)) + content


def _read_entry(read: Callable[[int], bytes]) -> tuple[int, array[int]] | None:
    """Return the next entry; None at the end, or if the entry is incomplete or damaged."""
    header = read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    line, count, checksum = _HEADER.unpack(header)
    if count > _MAX_ENTRY_TOKENS:
        return None
    content = read(4 * count)
    if len(content) < 4 * count or _checksum(line, count, content) != checksum:
        return None
    return line, array("I", content)


def _checksum(line: int, count: int, content: bytes) -> int:
    return crc32(content, crc32(struct.pack("<II", line, count)))
