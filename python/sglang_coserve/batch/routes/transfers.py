"""Reads the form of an upload as a stream, and gives up clients that stall."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractContextManager, aclosing
from email.message import Message
from typing import Any, Final

from fastapi.responses import StreamingResponse
from multipart import MultipartError, MultipartSegment, PushMultipartParser
from pydantic import ValidationError
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from sglang_coserve.batch.errors import SlowClientError
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.schemas import ExpiresAfter, ignored_fields
from sglang_coserve.web.errors import ApiError

_log = logging.getLogger(__name__)


async def received(chunks: AsyncIterator[bytes], limits: BatchLimits) -> AsyncGenerator[bytes]:
    """Yield ``chunks`` for as long as they keep coming; only waiting for the client counts.

    Raises:
        SlowClientError: nothing came for ``transfer_idle_s``, or ever less than
            ``min_transfer_bytes_per_s``.
    """
    loop = asyncio.get_running_loop()
    idle_s, rate = limits.transfer_idle_s, limits.min_transfer_bytes_per_s
    waited_s, size_bytes = 0.0, 0
    while True:
        began_s = loop.time()
        try:
            async with asyncio.timeout(min(idle_s, idle_s + size_bytes / rate - waited_s)):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise SlowClientError(
                f"the body stands still after {size_bytes:,} bytes: nothing came for "
                f"{idle_s:g} s, or less than {rate:,} bytes/s; send it again"
            ) from None
        waited_s += loop.time() - began_s
        size_bytes += len(chunk)
        yield chunk


class DownloadResponse(StreamingResponse):
    """Has a ``place`` until it ends, or the client stops reading; then ``chunks`` is closed."""

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        *,
        place: AbstractContextManager[Any],
        limits: BatchLimits,
        **kwargs: Any,
    ) -> None:
        super().__init__(chunks, **kwargs)
        self._chunks = chunks
        self._place = place
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``StreamingResponse``."""
        with self._place:
            async with aclosing(self._chunks):
                await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """See ``StreamingResponse``. What is cut off is seen to be, by ``content-length``."""
        idle_s, rate = self._limits.transfer_idle_s, self._limits.min_transfer_bytes_per_s

        async def send_soon(message: AsgiMessage) -> None:
            async with asyncio.timeout(idle_s + len(message.get("body", b"")) / rate):
                await send(message)

        try:
            await super().stream_response(send_soon)
        except TimeoutError:
            return


_MAX_FILENAME_CHARS: Final = 255
_MAX_FIELDS: Final = 16
"""Each may have headers, which take long to read: the parser allows 8 of 4 KiB."""

_MAX_OTHER_BYTES: Final = 128 << 10
"""Everything but the file."""
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"


def form_of(properties: dict[str, Any], *required: str, **others: Any) -> dict[str, Any]:
    """Return what OpenAPI says of a route whose body is a form with these fields."""
    schema = {"type": "object", "required": [*required], "properties": properties, **others}
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


class UploadForm:
    """A ``multipart/form-data`` body with one file, and fields before and after it.

    Every method raises ``ApiError`` for a form that is none, or lacks something.
    """

    def __init__(
        self, content_type: str, body: AsyncIterator[bytes], file_field: str = "file"
    ) -> None:
        """``file_field`` names the file's field; it is ``data`` for a part, which has no other."""
        # Not by the parser's module, which takes no boundary like ===1===, as some clients send it.
        header = Message()
        header["content-type"] = content_type
        boundary = header.get_boundary()
        if header.get_content_type() != "multipart/form-data" or not boundary:
            raise _malformed("send it as multipart/form-data, with a boundary")
        self._file_field = file_field
        self.filename = ""
        self._fields: dict[str, str] = {}
        self._has_file = False
        self._chunks = self._read(boundary, body)

    def expires_after(self) -> ExpiresAfter | None:
        """Return what the fields read so far say of the file's expiry."""
        names = (("anchor", _ANCHOR), ("seconds", _SECONDS))
        given = {short: self._fields[name] for short, name in names if name in self._fields}
        if not given:
            return None
        try:
            return ExpiresAfter.model_validate(given)
        except ValidationError as error:
            fault = error.errors()[0]
            param = f"expires_after[{fault['loc'][0]}]"
            message = f"{param}: {fault['msg']}"
            raise ApiError(message, code="invalid_value", param=param) from None

    async def read_to_file(self) -> None:
        """Read up to the first bytes of the file."""
        if await anext(self._chunks, None) is None:
            message = f"the form has no file: send one in the field {self._file_field!r}"
            raise ApiError(message, code="missing_file", param=self._file_field)
        if "purpose" in self._fields:  # It may come after the file as well.
            self._check_purpose()

    async def file_chunks(self) -> AsyncGenerator[bytes]:
        """Yield the file, then read the fields behind it."""
        async for chunk in self._chunks:
            yield chunk
        self._check_purpose()
        self.expires_after()
        if warning := ignored_fields(self._fields.keys() - {"purpose", _ANCHOR, _SECONDS}):
            _log.warning("file %r: %r", self.filename, warning)

    def _check_purpose(self) -> None:
        purpose = self._fields.get("purpose", "")
        if purpose != "batch" and self._file_field == "file":
            message = f"purpose must be 'batch', not {purpose[:64]!r}"
            raise ApiError(message, code="invalid_purpose", param="purpose")

    async def _read(self, boundary: str, body: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        """Yield nothing (``b""``) where the file begins, then the file; keep the fields."""
        field, value, other_bytes = "", bytearray(), 0
        try:
            with PushMultipartParser(boundary, max_segment_count=_MAX_FIELDS + 1) as parser:
                async for chunk in body:
                    other_bytes += len(chunk)
                    for event in parser.parse(chunk) if chunk else ():
                        if isinstance(event, MultipartSegment):
                            field, value = event.name, bytearray()
                            if field == self._file_field:
                                self._file_begins(event)
                                yield b""
                        elif field == self._file_field:
                            other_bytes -= len(event or b"")
                            yield event or b""
                        elif event is None:
                            self._fields[field] = value.decode(errors="replace")
                        else:
                            value += event
                    if other_bytes > _MAX_OTHER_BYTES:
                        raise _malformed(f"it has over {_MAX_OTHER_BYTES:,} bytes beside the file")
        except MultipartError as error:
            raise _malformed(str(error)) from error

    def _file_begins(self, part: MultipartSegment) -> None:
        name = self._file_field
        if part.filename is None:
            message = f"the part {name!r} has no filename"
            raise ApiError(message, code="missing_filename", param=name)
        if self._has_file:
            message = "the form has more than one file"
            raise ApiError(message, code="too_many_files", param=name)
        if not 0 < len(part.filename) <= _MAX_FILENAME_CHARS:
            message = f"filename must have 1 to {_MAX_FILENAME_CHARS} characters"
            raise ApiError(message, code="invalid_filename", param=name)
        self._has_file = True
        self.filename = part.filename


def _malformed(reason: str) -> ApiError:
    return ApiError(f"the form cannot be read: {reason}", code="invalid_form")
