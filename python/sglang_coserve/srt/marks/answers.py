"""What answers say of classes: 503 and ``Retry-After`` for who was refused, and the tier.

SGLang answers a stream with 200 before it knows, and reports a refusal in the first event, or in
the second of an Anthropic stream. The tier (``service_tier``) is inserted into OpenAI responses as
they are sent.
"""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from typing import Any, Final

from starlette.types import Message, Send

from sglang_coserve.asgi import error_content, send_json
from sglang_coserve.srt.marks.http_marks import SERVICE_TIER

_OVERLOADED: Final = HTTPStatus.SERVICE_UNAVAILABLE.value
_EVENT: Final = b"data: "
_OPENS: Final = b"event: message_start\n"
_ANTHROPIC_ERROR: Final = b"event: error\n" + _EVENT
_RETRY_AFTER: Final = (b"retry-after", b"1")
"""One second, the smallest value of the header. Refusing costs next to nothing, so clients may
retry early."""


class OverloadAnswer:
    """An ASGI ``send`` that delays the start of a stream until the event that tells.

    If that event reports an overload, an error response is sent instead of the stream.
    Otherwise the stream passes unchanged.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._delayed: list[Message] = []
        """The start of a stream, and an event that tells nothing yet."""

        self._is_refused = False

    async def __call__(self, message: Message) -> None:
        """Forward one message, or delay it."""
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            if message["status"] == _OVERLOADED:
                message = _with_retry_after(message)
            elif _is_stream(message):
                self._delayed = [message]
                return
        elif self._delayed:
            body = message.get("body", b"")
            if body.startswith(_OPENS) and len(self._delayed) == 1:
                self._delayed.append(message)
                return
            refusal = _refusal(body)
            if refusal is not None:
                self._is_refused = True
                await send_json(OverloadAnswer(self._send), _OVERLOADED, refusal)
                return
            delayed, self._delayed = self._delayed, []
            for one in delayed:
                await self._send(one)
        await self._send(message)


def _with_retry_after(message: Message) -> Message:
    headers = list(message["headers"])
    if all(name.lower() != _RETRY_AFTER[0] for name, _ in headers):
        headers.append(_RETRY_AFTER)
    return dict(message, headers=headers)


def _is_stream(message: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in message["headers"]
    )


def _refusal(body: bytes) -> dict[str, Any] | None:
    """Return the answer instead of a stream, if its first event reports an overload, else None."""
    is_anthropic = body.startswith(_ANTHROPIC_ERROR)
    said = b"overloaded_error" if is_anthropic else str(_OVERLOADED).encode()
    if not (is_anthropic or body.startswith(_EVENT)) or said not in body:
        return None
    try:
        event = json.loads(body.partition(b"\n\n")[0].partition(_EVENT)[2])
    except ValueError:
        return None
    error = _within(event, "error")
    if is_anthropic:
        return event if error.get("type") == "overloaded_error" else None
    for reason, code in ((error, "code"), (_finish(event), "status_code")):
        if reason.get(code) == _OVERLOADED:
            return error_content(_OVERLOADED, str(reason.get("message")))
    return None


def _finish(event: Any) -> dict[str, Any]:
    """Return the finish reason in an event of ``/generate``, or an empty dict."""
    return _within(_within(event, "meta_info"), "finish_reason")


def _within(value: Any, key: str) -> dict[str, Any]:
    inner = value.get(key) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else {}


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
