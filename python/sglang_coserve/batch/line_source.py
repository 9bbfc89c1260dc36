"""The unfinished lines of an input file, read a little ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sglang_coserve.batch.errors import StorageError
from sglang_coserve.batch.worker_threads import WorkerThreads
from sglang_coserve.jsonl.lines import is_blank, read_lines

__all__ = ["InputLine", "LineSource"]

_AHEAD_LINES: Final = 256
_AHEAD_BYTES: Final = 1 << 20
_SKIPPED_AT_ONCE: Final = 20_000


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line that asks for something and has no record yet."""

    number: int
    offset: int
    """Where it begins in the file."""

    content: bytes


class LineSource:
    """Yields the lines of a validated file whose numbers ``is_wanted``, in their order.

    Holds at most 256 lines, about 1 MiB, or one line if that is longer.
    """

    def __init__(
        self,
        path: Path,
        max_line_bytes: int,
        is_wanted: Callable[[int], bool],
        threads: WorkerThreads,
    ) -> None:
        self._path = path
        self._max_line_bytes = max_line_bytes
        self._is_wanted = is_wanted
        self._threads = threads
        self._offset = 0
        self._number = 0
        self._is_at_end = False
        self._ahead: deque[InputLine] = deque()

    def __aiter__(self) -> LineSource:
        return self

    async def __anext__(self) -> InputLine:
        while not self._ahead and not self._is_at_end:
            await self._threads.run(self._read_ahead)
        if not self._ahead:
            raise StopAsyncIteration
        return self._ahead.popleft()

    def _read_ahead(self) -> None:
        """Read some lines. A file that is mostly finished is passed over in several calls."""
        size_bytes = 0
        try:
            with self._path.open("rb", buffering=_AHEAD_BYTES) as file:
                file.seek(self._offset)
                for line in read_lines(file, self._max_line_bytes, after_line=self._number):
                    offset = self._offset
                    self._offset += line.size_bytes
                    self._number = line.number
                    if self._is_wanted(line.number) and not is_blank(line.content):
                        if line.content is None:
                            raise StorageError(f"{self._path} has changed since it was checked")
                        self._ahead.append(InputLine(line.number, offset, line.content))
                        size_bytes += line.size_bytes
                    if (
                        size_bytes >= _AHEAD_BYTES
                        or len(self._ahead) >= _AHEAD_LINES
                        or line.number % _SKIPPED_AT_ONCE == 0
                    ):
                        return
        except OSError as error:
            raise StorageError(f"{self._path} cannot be read: {error.strerror}") from error
        self._is_at_end = True
