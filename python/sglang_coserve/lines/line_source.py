"""Reads the unfinished lines of an input file, in file order or in prefix order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sglang_coserve.errors import StorageError, disk_errors
from sglang_coserve.jsonl.lines import FileLine, has_order, is_blank, read_lines, read_order
from sglang_coserve.lines.background import WorkerThreads


class LineBitmap:
    """1-based line numbers; a million of them take 125 kB."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def __contains__(self, line: int) -> bool:
        index = line >> 3
        return index < len(self._bits) and bool(self._bits[index] & (1 << (line & 7)))

    def add(self, line: int) -> bool:
        """Add ``line``; return False if it was present already. Amortized O(1)."""
        if line in self:
            return False
        index = line >> 3
        if index >= len(self._bits):
            self._bits.extend(bytes(index + 1 - len(self._bits)))
        self._bits[index] |= 1 << (line & 7)
        return True


_AHEAD_LINES: Final = 256
_AHEAD_BYTES: Final = 1 << 20
_SKIPPED_AT_ONCE: Final = 20_000


class LineSource:
    """Yields the lines of a file whose numbers ``is_wanted``, each of them once.

    They come in the order of a whole ``order``, or else of the file.
    Buffers at most 256 lines, about 1 MiB, or one line if that is longer.
    """

    def __init__(
        self,
        path: Path,
        max_line_bytes: int,
        is_wanted: Callable[[int], bool],
        threads: WorkerThreads,
        order: Path | None = None,
    ) -> None:
        """``order`` is where a prefix order is, if there is one; None for none."""
        self._path = path
        self._max_line_bytes = max_line_bytes
        self._is_wanted = is_wanted
        self._threads = threads
        self._order = order
        self._is_ordered: bool | None = None
        """None before the first line."""

        self._place = 0
        self._offset = 0
        self._number = 0
        self._is_at_end = False
        self._ahead: deque[FileLine] = deque()

    def __aiter__(self) -> LineSource:
        return self

    async def __anext__(self) -> FileLine:
        while not self._ahead and not self._is_at_end:
            await self._threads.run(self._read_ahead)
        if not self._ahead:
            raise StopAsyncIteration
        return self._ahead.popleft()

    def _read_ahead(self) -> None:
        """Read some lines; skipping many finished lines takes several calls."""
        if self._is_ordered is None:
            self._is_ordered = self._order is not None and has_order(self._order)
        with disk_errors(f"{self._path} cannot be read"):
            if self._is_ordered:
                self._read_in_order()
            else:
                self._read_on()

    def _read_on(self) -> None:
        size_bytes = 0
        with self._path.open("rb", buffering=_AHEAD_BYTES) as file:
            file.seek(self._offset)
            for line in read_lines(
                file, self._max_line_bytes, after_line=self._number, offset=self._offset
            ):
                self._offset += line.size_bytes
                self._number = line.number
                if self._is_wanted(line.number) and not is_blank(line.content):
                    self._ahead.append(line)
                    size_bytes += line.size_bytes
                if self._is_enough(size_bytes) or line.number % _SKIPPED_AT_ONCE == 0:
                    return
        self._is_at_end = True

    def _read_in_order(self) -> None:
        assert self._order is not None
        with self._order.open("rb") as order:
            entries = read_order(order, self._place, _SKIPPED_AT_ONCE)
        size_bytes, before = 0, self._place
        with self._path.open("rb") as file:
            for offset, number in entries:
                if self._is_enough(size_bytes):
                    return
                self._place += 1
                if self._is_wanted(number):
                    file.seek(offset)
                    found = read_lines(
                        file, self._max_line_bytes, after_line=number - 1, offset=offset
                    )
                    if (line := next(found, None)) is None:
                        raise StorageError(f"{self._path} has changed since it was checked")
                    self._ahead.append(line)
                    size_bytes += line.size_bytes
        if self._place == before:
            self._is_at_end = True

    def _is_enough(self, size_bytes: int) -> bool:
        return size_bytes >= _AHEAD_BYTES or len(self._ahead) >= _AHEAD_LINES
