"""Parses lines into requests without holding the event loop or the interpreter lock for long."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sglang_coserve.errors import StorageError
from sglang_coserve.jsonl.body_limits import BodyLimits, BodyTooLargeError, check_body
from sglang_coserve.jsonl.request_line import BadLineError, RequestLine, parse_request_line
from sglang_coserve.lines.helper_process import run_module
from sglang_coserve.lines.line_source import InputLine
from sglang_coserve.lines.worker_threads import WorkerThreads

__all__ = ["LineParser"]

_MODULE: Final = "sglang_coserve.jsonl.line_id"

_SMALL_BYTES: Final = 1 << 16
"""Takes less than half a millisecond to parse."""


class LineParser:
    """Parses the lines of a file that has been checked.

    Every method raises ``StorageError`` when a line is not what it was then.
    """

    def __init__(
        self, path: Path, endpoint: str, limits: BodyLimits, threads: WorkerThreads
    ) -> None:
        self._path = path
        self._endpoint = endpoint
        self._limits = limits
        self._threads = threads

    async def parse(self, line: InputLine) -> RequestLine:
        """Return what a line asks for.

        Raises:
            BodyTooLargeError: it is more than the limits allow.
        """
        if line.size_bytes <= _SMALL_BYTES:
            return self._parse(line)
        return await self._threads.run(self._parse, line)

    async def custom_id(self, line: InputLine) -> str:
        """Return the id of a line, whatever its size."""
        try:
            return (await self.parse(line)).custom_id
        except BodyTooLargeError:
            what = f"reading line {line.number} of {self._path}"
            arguments = (str(self._path), str(line.offset), self._endpoint)
            custom_id = await run_module(what, _MODULE, *arguments)
            return str(custom_id)

    def _parse(self, line: InputLine) -> RequestLine:
        if line.content is None:
            raise StorageError(f"{self._path} has changed since it was checked")
        check_body(line.content, self._limits)
        try:
            return parse_request_line(line.content, self._endpoint)
        except BadLineError as error:
            raise StorageError(
                f"line {line.number} of {self._path} has changed: {error}"
            ) from error
