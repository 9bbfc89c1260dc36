"""What answers say of classes: 503 and ``Retry-After`` for who was refused, the tier, the wait.

SGLang answers a stream with 200 before it knows, and reports a refusal in the first event. The tier
(``service_tier``) is inserted into OpenAI responses as they are sent.

Proxies cut connections on which nothing comes for half a minute or so. A stream that waits for room
gets empty lines now and then, which clients skip. Comments would do for most of them, but SGLang's
``bench_serving`` takes every line that is not empty for JSON. OpenAI's contract for flex is the
other way: 429, code ``resource_unavailable``. Who wants that says in ``x-coserve-wait`` how long
there may be no room.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final

from starlette.types import Message, Send

from sglang_coserve.asgi import send_error, send_json
from sglang_coserve.errors import RequestError
from sglang_coserve.srt.marks.http_marks import SERVICE_TIER, duration_s

_OVERLOADED: Final = HTTPStatus.SERVICE_UNAVAILABLE.value
_EVENT: Final = b"data: "
_RETRY_AFTER: Final = (b"retry-after", b"1")
"""One second, the smallest value of the header. Refusing costs next to nothing, so clients may
retry early."""


class OverloadAnswer:
    """An ASGI ``send`` that delays the start of a stream until its first event.

    If that event reports an overload, an error response is sent instead of the stream.
    Otherwise the stream passes unchanged.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._is_refused = False

    async def __call__(self, message: Message) -> None:
        """Forward one message, or delay it."""
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            if message["status"] == _OVERLOADED:
                message = _with_retry_after(message)
            elif _is_stream(message):
                self._start = message
                return
        elif self._start is not None:
            start, self._start = self._start, None
            refusal = _refusal(message.get("body", b""))
            if refusal is not None:
                self._is_refused = True
                await send_error(OverloadAnswer(self._send), _OVERLOADED, refusal)
                return
            await self._send(start)
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


def _refusal(body: bytes) -> str | None:
    """Return the message of the first event if it reports an overload, else None."""
    if not body.startswith(_EVENT) or str(_OVERLOADED).encode() not in body:
        return None
    try:
        event = json.loads(body.partition(b"\n\n")[0].removeprefix(_EVENT))
    except ValueError:
        return None
    for error, code in ((_within(event, "error"), "code"), (_finish(event), "status_code")):
        if error.get(code) == _OVERLOADED:
            return str(error.get("message"))
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


HasRoom = Callable[[], Awaitable[bool]]
"""Says whether an offline request that comes now would begin soon."""

_HEADER: Final = b"x-coserve-wait"
_MOST_WAIT_S: Final = 600.0
"""Who hangs up meanwhile is not noticed before."""

_LOOK_S: Final = 0.1
_INTERVAL_S: Final = 15.0
_EMPTY_LINES: Final = b"\n\n"
_EVENTS: Final = [(b"content-type", b"text/event-stream; charset=utf-8")]
_RETRY_AFTER_S: Final = 5


async def is_refused(headers: Iterable[tuple[bytes, bytes]], has_room: HasRoom, send: Send) -> bool:
    """Wait for room for an offline request, if it bounds that; refuse it if there is none by then.

    Raises:
        RequestError: the bound is no duration, or longer than ten minutes.
    """
    asked = [value for name, value in headers if name.lower() == _HEADER]
    if not asked:
        return False
    wait_s = duration_s(_HEADER.decode(), asked[-1], may_be_zero=True)
    if wait_s > _MOST_WAIT_S:
        most = f"{_MOST_WAIT_S:g}s"
        raise RequestError(
            f"{_HEADER.decode()} may be at most {most}; without it there is no bound"
        )
    give_up_s = time.monotonic() + wait_s
    while not await has_room():
        left_s = give_up_s - time.monotonic()
        if left_s <= 0:
            await _refuse(send, wait_s)
            return True
        await asyncio.sleep(min(left_s, _LOOK_S))
    return False


async def _refuse(send: Send, wait_s: float) -> None:
    error = {
        "message": f"online requests and earlier offline ones leave no room now, nor did they for"
        f" {wait_s:g} s: send it again later, or without {_HEADER.decode()}, to wait for it",
        "type": "rate_limit_error",
        "param": None,
        "code": "resource_unavailable",
    }
    status, headers = HTTPStatus.TOO_MANY_REQUESTS.value, {"retry-after": str(_RETRY_AFTER_S)}
    await send_json(send, status, {"error": error}, headers)


@asynccontextmanager
async def kept_alive(send: Send, interval_s: float = _INTERVAL_S) -> AsyncGenerator[Send]:
    """Within it, a stream sends empty lines whenever nothing else was sent for ``interval_s``."""
    stream = _Stream(send, interval_s)
    keeping = asyncio.create_task(stream.keep_alive())
    try:
        yield stream.forward
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})


class _Stream:
    def __init__(self, send: Send, interval_s: float) -> None:
        self._send = send
        self._interval_s = interval_s
        self._sending = asyncio.Lock()
        self._last_s = time.monotonic()
        self._is_open = True
        """Events may come, or have come and not ended."""

        self._is_between_events = True
        self._has_begun = False
        self._is_ours = False
        """The answer was begun here, before the route knew what it answers."""

        self._failure: bytearray | None = None
        """What the route answers instead of a stream that was begun here."""

    async def keep_alive(self) -> None:
        """Send empty lines until the stream ends."""
        while self._is_open:
            due_s = self._last_s + self._interval_s
            if (left_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(left_s)
                continue
            async with self._sending:
                await self._send_empty_lines()
            self._last_s = time.monotonic()

    async def _send_empty_lines(self) -> None:
        if not self._is_open or not self._is_between_events or self._failure is not None:
            return
        if not self._has_begun:
            self._has_begun = self._is_ours = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        await self._send({"type": "http.response.body", "body": _EMPTY_LINES, "more_body": True})

    async def forward(self, message: Message) -> None:
        """Pass on one message of the route."""
        async with self._sending:
            self._last_s = time.monotonic()
            if message["type"] == "http.response.start":
                await self._begin(message)
            elif self._failure is not None:
                self._failure += message.get("body", b"")
                if not message.get("more_body", False):
                    await self._send({"type": "http.response.body", "body": _event(self._failure)})
            else:
                body = message.get("body", b"")
                self._is_between_events = body.endswith(b"\n\n") if body else True
                self._is_open = self._is_open and bool(message.get("more_body", False))
                await self._send(message)

    async def _begin(self, message: Message) -> None:
        is_stream = _is_stream(message)
        self._has_begun, self._is_open = True, is_stream
        if not self._is_ours:
            await self._send(message)
        elif not is_stream:
            self._failure = bytearray()


def _event(failure: bytes | bytearray) -> bytes:
    """Return what was to be an answer of its own as OpenAI's clients know errors in streams."""
    try:
        found: Any = json.loads(failure)
    except ValueError:
        found = {"message": failure.decode(errors="replace")}
    if not isinstance(found, dict) or "error" not in found:
        found = {"error": found}
    return b"data: " + json.dumps(found).encode() + b"\n\n"
