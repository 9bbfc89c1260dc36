"""Reads the form of an upload as a stream, and gives up clients that stall."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractContextManager, aclosing
from typing import Any, Final

from fastapi.responses import StreamingResponse
from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Message, Receive, Scope, Send

from sglang_coserve.batch.errors import BatchRequestError, SlowClientError
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.schemas import ExpiresAfter


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

        async def send_soon(message: Message) -> None:
            async with asyncio.timeout(idle_s + len(message.get("body", b"")) / rate):
                await send(message)

        try:
            await super().stream_response(send_soon)
        except TimeoutError:
            return


_MAX_FILENAME_CHARS: Final = 255
_MAX_FIELDS: Final = 16
"""Each may have headers, which take long to read: python-multipart allows 8 of 4 KiB."""

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

    Every method raises ``BatchRequestError`` for a form that is none, or lacks something.
    """

    def __init__(
        self, content_type: str, body: AsyncIterator[bytes], file_field: str = "file"
    ) -> None:
        """``file_field`` names the file's field; it is ``data`` for a part, which has no other."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise _malformed("send it as multipart/form-data, with a boundary")
        self._file_field = file_field
        self.filename = ""
        self._body = body
        self._fields: dict[str, str] = {}
        self._pieces: deque[bytes] = deque()
        self._has_file = False
        self._is_complete = False
        self._num_fields = 0
        self._other_bytes = 0
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._field_name: str | None = None
        self._field_value = bytearray()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begins,
                    "on_header_field": self._header_name_comes,
                    "on_header_value": self._header_value_comes,
                    "on_header_end": self._header_ends,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._data_comes,
                    "on_part_end": self._part_ends,
                    "on_end": self._form_ends,
                },
            )
        except FormParserError as error:
            raise _malformed(str(error)) from error

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
            raise BatchRequestError(message, code="invalid_value", param=param) from None

    async def read_to_file(self) -> None:
        """Read up to the first bytes of the file."""
        while not self._has_file:
            if self._is_complete:
                message = f"the form has no file: send one in the field {self._file_field!r}"
                raise BatchRequestError(message, code="missing_file", param=self._file_field)
            await self._read_on()
        if "purpose" in self._fields:  # It may come after the file as well.
            self._check_purpose()

    async def file_chunks(self) -> AsyncGenerator[bytes]:
        """Yield the file, then read the fields behind it."""
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            if self._is_complete:
                break
            await self._read_on()
        self._check_purpose()
        self.expires_after()

    def _check_purpose(self) -> None:
        purpose = self._fields.get("purpose", "")
        if purpose != "batch" and self._file_field == "file":
            message = f"purpose must be 'batch', not {purpose[:64]!r}"
            raise BatchRequestError(message, code="invalid_purpose", param="purpose")

    async def _read_on(self) -> None:
        async for chunk in self._body:
            self._other_bytes += len(chunk)
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                raise _malformed(str(error)) from error
            if self._other_bytes > _MAX_OTHER_BYTES:
                raise _malformed(f"it has more than {_MAX_OTHER_BYTES:,} bytes beside the file")
            return
        raise _malformed("it ends before its last boundary")

    def _part_begins(self) -> None:
        self._disposition = b""
        self._field_name = None
        self._field_value.clear()

    def _header_name_comes(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _header_value_comes(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_ends(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        filename = options.get(b"filename")
        if name != self._file_field:
            self._num_fields += 1
            if self._num_fields > _MAX_FIELDS:
                raise _malformed(f"it has more than {_MAX_FIELDS} fields")
            self._field_name = name
        elif filename is None:
            message = f"the part {name!r} has no filename"
            raise BatchRequestError(message, code="missing_filename", param=name)
        elif self._has_file:
            message = "the form has more than one file"
            raise BatchRequestError(message, code="too_many_files", param=name)
        else:
            self._has_file = True
            self.filename = filename.decode(errors="replace")
            if not 0 < len(self.filename) <= _MAX_FILENAME_CHARS:
                message = f"filename must have 1 to {_MAX_FILENAME_CHARS} characters"
                raise BatchRequestError(message, code="invalid_filename", param=name)

    def _data_comes(self, data: bytes, start: int, end: int) -> None:
        if self._field_name is None:
            self._other_bytes -= end - start
            self._pieces.append(data[start:end])
            return
        self._field_value += data[start:end]

    def _part_ends(self) -> None:
        if self._field_name is not None:
            self._fields[self._field_name] = self._field_value.decode(errors="replace")

    def _form_ends(self) -> None:
        self._is_complete = True


def _malformed(reason: str) -> BatchRequestError:
    return BatchRequestError(f"the form cannot be read: {reason}", code="invalid_form")
