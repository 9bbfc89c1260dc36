"""What answers say of classes: 503 and ``Retry-After`` for who was refused, and the tier.

SGLang answers a stream with 200 before it knows, and some routes name a refusal otherwise than with
503. So the tokenizer manager says what the engine refuses (``telling_refusals``). The tier
(``service_tier``) is inserted into OpenAI responses as they are sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.types import Message, Send

from sglang_coserve.srt.marks.http_marks import SERVICE_TIER
from sglang_coserve.srt.marks.wanted_model import in_protocol_of
from sglang_coserve.web.asgi import openai_error, send_json

_OVERLOADED: Final = HTTPStatus.SERVICE_UNAVAILABLE.value
_STREAMS: Final = (b"text/event-stream", b"application/x-ndjson")
_ONE_ID: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/invocations"})
_RETRY_AFTER: Final = ("retry-after", "1")
"""One second, the smallest value of the header. Refusing costs next to nothing, so clients may
retry early."""

_ANSWER: Final[ContextVar[OverloadAnswer | None]] = ContextVar(
    "the answer to the request being served", default=None
)


async def telling_refusals(outputs: AsyncIterator[Any]) -> AsyncGenerator[Any]:
    """Yield the engine's outputs of a request; tell the answer to it of each before.

    The choices of one of OpenAI's answers get one id: each is a request of its own in the engine.
    """
    answer, first_id = _ANSWER.get(), None
    has_one_id = answer is not None and answer.has_one_id
    try:
        async for output in outputs:
            about = output.get("meta_info", {}) if isinstance(output, dict) else {}
            reason: Any = about.get("finish_reason")
            is_refusal = isinstance(reason, dict) and reason.get("status_code") == _OVERLOADED
            if answer is not None:
                answer.hear(str(reason.get("message")) if is_refusal else None)
            if has_one_id and about:
                first_id = first_id or about["id"]
                if about["id"] != first_id:
                    output = {**output, "meta_info": {**about, "id": first_id}}
            yield output
    except HTTPException as error:
        if answer is not None and error.status_code == _OVERLOADED:
            answer.hear(error.detail)
        raise


class OverloadAnswer:
    """An ASGI ``send`` that delays a stream until the engine has answered, or the stream ends.

    What has not started when the engine refuses the request is an error response instead, in the
    protocol of the route at ``path``.
    """

    def __init__(self, send: Send, path: str = "") -> None:
        self._send = send
        self._path = path
        self._delayed: list[Message] = []
        self._is_served = False
        self._has_started = False
        self._refusal: str | None = None
        self._is_replaced = False

    @property
    def has_one_id(self) -> bool:
        """Whether the protocol has one id for all parts of an answer."""
        return self._path in _ONE_ID

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Let ``telling_refusals`` tell this answer, within this context."""
        token = _ANSWER.set(self)
        try:
            yield
        finally:
            _ANSWER.reset(token)

    def hear(self, refusal: str | None) -> None:
        """Take note of an output of the engine; None if it does not refuse the request."""
        if refusal is None:
            self._is_served = True
        else:
            self._refusal = refusal

    async def __call__(self, message: Message) -> None:
        """Forward one message, delay it, or replace the answer."""
        if self._is_replaced:
            return
        is_start = message["type"] == "http.response.start"
        if is_start and message["status"] == _OVERLOADED:
            message = _with_retry_after(message)
        elif self._refusal is not None and not self._has_started:
            self._is_replaced = True
            error = openai_error(_OVERLOADED, self._refusal)
            content = in_protocol_of(self._path, error, "overloaded_error", self._refusal)
            await send_json(self._send, _OVERLOADED, content, dict([_RETRY_AFTER]))
            return
        elif not self._is_served and (
            _is_stream(message) if is_start else self._delayed and message.get("more_body")
        ):
            self._delayed.append(message)
            return
        self._has_started = True
        delayed, self._delayed = self._delayed, []
        for each in (*delayed, message):
            await self._send(each)


def _with_retry_after(message: Message) -> Message:
    headers = list(message["headers"])
    name, seconds = (each.encode() for each in _RETRY_AFTER)
    if all(given.lower() != name for given, _ in headers):
        headers.append((name, seconds))
    return dict(message, headers=headers)


def _is_stream(message: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(_STREAMS)
        for name, value in message["headers"]
    )


# The first object in an event. Cannot occur inside of a JSON string, where quotes are escaped.
_NESTED: Final = re.compile(rb'(data: \{[^{}]*"response":\s*\{)')
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
