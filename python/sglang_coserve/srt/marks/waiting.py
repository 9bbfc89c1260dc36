"""Offline requests that wait for room: streams say so, and who asks is refused instead.

Proxies cut connections on which nothing comes for half a minute or so. A stream that waits gets a
comment now and then, which clients skip. OpenAI's contract for flex is the other way: 429, code
``resource_unavailable``. Who wants that says in ``x-coserve-wait`` how long there may be no room.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final

from sglang_coserve.asgi import Message, Send, send_json
from sglang_coserve.errors import RequestError
from sglang_coserve.srt.marks.http_marks import duration_s

__all__ = ["HasRoom", "is_refused", "kept_alive"]

HasRoom = Callable[[], Awaitable[bool]]
"""Says whether an offline request that comes now would begin soon."""

_HEADER: Final = b"x-coserve-wait"
_MOST_WAIT_S: Final = 600.0
"""Who hangs up meanwhile is not noticed before."""

_LOOK_S: Final = 0.1
_INTERVAL_S: Final = 15.0
_COMMENT: Final = b": waiting\n\n"
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
    """Within it, a stream sends a comment whenever nothing else was sent for ``interval_s``."""
    stream = _Stream(send, interval_s)
    comments = asyncio.create_task(stream.comment())
    try:
        yield stream.forward
    finally:
        comments.cancel()
        await asyncio.wait({comments})


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

    async def comment(self) -> None:
        """Send comments until the stream ends."""
        while self._is_open:
            due_s = self._last_s + self._interval_s
            if (left_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(left_s)
                continue
            async with self._sending:
                await self._comment_now()
            self._last_s = time.monotonic()

    async def _comment_now(self) -> None:
        if not self._is_open or not self._is_between_events or self._failure is not None:
            return
        if not self._has_begun:
            self._has_begun = self._is_ours = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        await self._send({"type": "http.response.body", "body": _COMMENT, "more_body": True})

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
        is_stream = any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in message["headers"]
        )
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
