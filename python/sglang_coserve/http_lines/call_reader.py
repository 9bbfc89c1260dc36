"""Divides what comes in at an engine into calls, none of them larger than it may be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sglang_coserve.errors import RequestError
from sglang_coserve.http_lines.messages import LineCall, call_id, decode_message
from sglang_coserve.jsonl.body_limits import BodyLimits, BodyMeter, BodyTooLargeError

__all__ = ["BadCallError", "CallReader"]

_HEAD_BYTES: Final = 64
"""Of a call that is too large: its id is in them."""


class BadCallError(RequestError):
    """A call that cannot be read."""

    def __init__(self, message: str, call: int | None, *, is_too_large: bool = False) -> None:
        super().__init__(message)
        self.call = call
        """Its id; None where even that is unknown."""

        self.is_too_large = is_too_large


class CallReader:
    """Calls as JSON lines, in pieces of any size. Keeps at most one call that is within
    ``limits``."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._begin()

    def _begin(self) -> None:
        self._meter = BodyMeter(self._limits)
        self._parts: list[bytes] = []
        self._fault: BodyTooLargeError | None = None

    def feed(self, content: bytes) -> Iterator[LineCall | BadCallError]:
        """Yield what ends in ``content``, in order."""
        *ends, rest = content.split(b"\n")
        for end in ends:
            self._take(end)
            call = self._call()
            self._begin()
            if call is not None:
                yield call
        self._take(rest)

    def _take(self, part: bytes) -> None:
        if self._fault is not None or not part:
            return
        self._parts.append(part)
        try:
            self._meter.take(part)
        except BodyTooLargeError as error:
            self._fault = error
            self._parts = [b"".join(self._parts)[:_HEAD_BYTES]]

    def _call(self) -> LineCall | BadCallError | None:
        content = b"".join(self._parts)
        if self._fault is not None:
            return BadCallError(str(self._fault), call_id(content), is_too_large=True)
        if not content:
            return None
        try:
            return decode_message(content, LineCall)
        except RequestError as error:
            return BadCallError(str(error), call_id(content))
