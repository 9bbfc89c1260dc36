"""Inserts the tier used (``service_tier``) into OpenAI responses as they are sent."""

from __future__ import annotations

import json
import re
from typing import Final

from sglang_coserve.asgi import Message, Send
from sglang_coserve.srt.marks.body_marks import SERVICE_TIER

__all__ = ["TierWriter"]

# Cannot occur inside of a JSON string, where quotes are escaped.
_NESTED: Final = re.compile(rb'("response":\s*\{)')
_UNSAID: Final = b'"service_tier":null'


class TierWriter:
    """An ASGI ``send`` that inserts ``service_tier`` as the first field of every JSON object sent.

    A response is one JSON object, or server-sent events of one object each;
    inserting after the opening brace needs no parsing and no buffering of
    streams.  In events of ``/v1/responses`` the response is a nested object.  Error
    responses pass unchanged.
    """

    def __init__(self, send: Send, tier: str) -> None:
        self._send = send
        field = json.dumps({SERVICE_TIER: tier}, separators=(",", ":"))[1:-1].encode()
        self._field = field + b","
        self._kind: str | None = None
        self._at_event_start = True

    async def __call__(self, message: Message) -> None:
        """Forward one message, with the tier inserted."""
        if message["type"] == "http.response.start":
            message = self._start(message)
        elif message["type"] == "http.response.body" and self._kind is not None:
            message = dict(message, body=self._insert(message.get("body", b"")))
        await self._send(message)

    def _start(self, message: Message) -> Message:
        if message["status"] != 200:
            return message
        headers = list(message["headers"])
        content_type = next(
            (value for name, value in headers if name.lower() == b"content-type"), b""
        )
        if content_type.startswith(b"text/event-stream"):
            self._kind = "events"
        elif content_type.startswith(b"application/json"):
            self._kind = "object"
            headers = [
                (name, str(int(value) + len(self._field)).encode())
                if name.lower() == b"content-length"
                else (name, value)
                for name, value in headers
            ]
        return dict(message, headers=headers)

    def _insert(self, body: bytes) -> bytes:
        if self._kind == "events":
            # An event never contains a blank line, as JSON escapes newlines.
            opening, marked = b"data: {", b"data: {" + self._field
            if self._at_event_start and body.startswith(opening):
                body = marked + body[len(opening) :]
            if b'"response"' in body:
                body = self._insert_inside(body)
            self._at_event_start = body.endswith(b"\n\n") if body else self._at_event_start
            return body.replace(b"\n\n" + opening, b"\n\n" + marked)
        if body.startswith(b"{"):
            self._kind = None  # Only the first chunk contains the opening brace.
            return b"{" + self._field + body[1:]
        return body

    def _insert_inside(self, events: bytes) -> bytes:
        if _UNSAID in events:
            return events.replace(_UNSAID, self._field[:-1])
        return _NESTED.sub(rb"\1" + self._field, events)
