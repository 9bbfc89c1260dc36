"""OpenAI's ``service_tier`` (and our ``coserve_…`` keys) on SGLang's HTTP routes.

An ASGI middleware moves the marks of chat and completion bodies into
``custom_params`` before the route sees the body, and writes the tier used into
the response.  A body without the bytes of a mark's name passes through as it is,
so that unmarked traffic gets the stock response.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from sglang_coserve.errors import RequestError
from sglang_coserve.srt.asgi import App, Message, Receive, Scope, Send, replay, send_error
from sglang_coserve.srt.body_marks import SERVICE_TIER, MarkedBody, move_marks
from sglang_coserve.srt.request_marks import MARK_PREFIX

__all__ = ["MARKED_PATHS", "ServiceTierMiddleware"]

MARKED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Routes whose bodies may carry marks."""

# Two searches for a substring are much faster than one regular expression.
_NAMES: Final = (MARK_PREFIX.encode(), SERVICE_TIER.encode())


_LARGE_BYTES: Final = 1 << 16
"""Takes half a millisecond to parse and write anew."""


class ServiceTierMiddleware:
    """Moves the marks of OpenAI bodies; see the module's docstring."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if (
            scope["type"] != "http"
            or scope["method"] != "POST"
            or scope["path"].rstrip("/") not in MARKED_PATHS
        ):
            await self._app(scope, receive, send)
            return
        body, disconnect = await _read_body(receive)
        if disconnect is not None:
            return
        try:
            marked = await _marked(body)
        except RequestError as error:
            await send_error(send, 400, str(error))
            return
        if marked is None:
            await self._app(scope, replay(body, receive), send)
            return
        scope = dict(scope, headers=_with_content_length(scope["headers"], len(marked.content)))
        if marked.tier_used is not None:
            send = _TierWriter(send, marked.tier_used)
        await self._app(scope, replay(marked.content, receive), send)


class _TierWriter:
    """An ASGI ``send`` that puts ``service_tier`` first into every JSON object sent.

    A response is one JSON object, or server-sent events of one object each;
    inserting behind the opening brace needs no parsing and keeps streams
    unbuffered.  Error responses pass unchanged.
    """

    def __init__(self, send: Send, tier: str) -> None:
        self._send = send
        self._field = json.dumps({SERVICE_TIER: tier})[1:-1].encode() + b","
        self._kind: str | None = None
        self._at_event_start = True

    async def __call__(self, message: Message) -> None:
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
            # A blank line is never inside an event: JSON escapes its newlines.
            opening, marked = b"data: {", b"data: {" + self._field
            if self._at_event_start and body.startswith(opening):
                body = marked + body[len(opening) :]
            self._at_event_start = body.endswith(b"\n\n") if body else self._at_event_start
            return body.replace(b"\n\n" + opening, b"\n\n" + marked)
        if body.startswith(b"{"):
            self._kind = None  # Only the first chunk opens the object.
            return b"{" + self._field + body[1:]
        return body


async def _marked(body: bytes) -> MarkedBody | None:
    if not any(name in body for name in _NAMES):
        return None
    if len(body) < _LARGE_BYTES:
        return move_marks(body)
    return await asyncio.to_thread(move_marks, body)


async def _read_body(receive: Receive) -> tuple[bytes, Message | None]:
    chunks = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"", message
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks), None


def _with_content_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]
