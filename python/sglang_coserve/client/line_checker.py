"""Turns a line of the input into a request, or into an error record."""

from __future__ import annotations

from collections.abc import Callable

from sglang_coserve.jsonl.request_line import (
    BadLineError,
    RequestLine,
    custom_id_of,
    parse_json,
    request_of,
)
from sglang_coserve.jsonl.seen_ids import SeenIds
from sglang_coserve.lines.backend import LineResult
from sglang_coserve.lines.line_run import UnservedLine
from sglang_coserve.lines.line_source import InputLine

__all__ = ["LineChecker"]


class LineChecker:
    """Checks the lines of one file, as they come from a ``LineSource`` with unique ids.

    A line whose ``custom_id`` appeared on any earlier line is a duplicate, whether or not that
    earlier line was valid. So which line is the duplicate depends on the input alone, and is the
    same in a resumed run.
    """

    def __init__(self, max_line_bytes: int, is_finished: Callable[[int], bool]) -> None:
        self._max_line_bytes = max_line_bytes
        self._is_finished = is_finished
        self._seen = SeenIds()

    def check(self, line: InputLine) -> RequestLine | UnservedLine | None:
        """Return the request of a line, or its failed result; None for a finished line."""
        fields: object = None
        error: BadLineError | None = None
        try:
            fields = self._fields(line)
        except BadLineError as found:
            error = found
        custom_id = custom_id_of(fields)
        is_first = line.is_first
        if is_first is None:
            is_first = custom_id is None or self._seen.add(custom_id)
        if self._is_finished(line.number):
            return None
        try:
            if error is not None:
                raise error
            return _request(fields, is_first=is_first)
        except BadLineError as found:
            return UnservedLine(custom_id, LineResult.unserved(found.code, str(found)))

    def close(self) -> None:
        """Release the memory of the ids seen."""
        self._seen.close()

    def _fields(self, line: InputLine) -> object:
        if line.content is None:
            message = f"{line.size_bytes} bytes, more than the limit of {self._max_line_bytes}"
            raise BadLineError("line_too_long", message)
        return parse_json(line.content)


def _request(fields: object, *, is_first: bool) -> RequestLine:
    request = request_of(fields, None)
    if not is_first:
        message = "an earlier line has the same custom_id: make it unique"
        raise BadLineError("duplicate_custom_id", message)
    if request.body.get("stream"):
        message = "a batch line cannot stream: remove stream from its body"
        raise BadLineError("stream_not_supported", message)
    return request
