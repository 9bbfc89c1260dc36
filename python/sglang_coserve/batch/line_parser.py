"""Parses lines into requests without holding the event loop or the interpreter lock for long."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sglang_coserve.batch.context import JobContext
from sglang_coserve.batch.record import JobRecord
from sglang_coserve.errors import StorageError
from sglang_coserve.jsonl.body_limits import BodyTooLargeError, check_body
from sglang_coserve.jsonl.request_line import BadLineError, RequestLine, parse_request_line
from sglang_coserve.lines.line_source import InputLine

__all__ = ["LineParser"]

_SMALL_BYTES: Final = 1 << 16
"""Takes less than half a millisecond to parse."""


class LineParser:
    """Parses the lines of a batch's input, which has been checked.

    Every method raises ``StorageError`` when a line is not what it was then.
    """

    def __init__(self, batch: JobRecord, path: Path, context: JobContext) -> None:
        self._batch = batch
        self._path = path
        self._context = context

    async def parse(self, line: InputLine) -> RequestLine:
        """Return what a line asks for.

        Raises:
            BodyTooLargeError: it is more than the limits allow.
        """
        if line.size_bytes <= _SMALL_BYTES:
            return self._parse(line)
        return await self._context.threads.run(self._parse, line)

    async def custom_id(self, line: InputLine) -> str:
        """Return the id of a line, whatever its size."""
        try:
            return (await self.parse(line)).custom_id
        except BodyTooLargeError:
            return await self._context.file_processes.custom_id(
                self._batch, self._path, line.offset, line.size_bytes
            )

    def _parse(self, line: InputLine) -> RequestLine:
        if line.content is None:
            raise StorageError(f"{self._path} has changed since it was checked")
        check_body(line.content, self._context.backend.limits)
        try:
            return parse_request_line(line.content, self._batch.endpoint)
        except BadLineError as error:
            raise StorageError(
                f"line {line.number} of {self._path} has changed: {error}"
            ) from error
