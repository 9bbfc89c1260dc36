"""Discards the rest of a request body that is answered before its end.

A body that is too large, or malformed at its beginning, is answered while the client is still
sending it. If the server closed the connection, the client might never read the
answer; if it reads on, as uvicorn does, the event loop is busy for as long as the client
sends, perhaps forever. So the rest is read at a limited rate and
for a limited time before the answer is sent.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from sglang_coserve.asgi import App, Message, Receive, Scope, Send

__all__ = ["UnreadBodyMiddleware"]

_BYTES_PER_S: Final = 32 << 20
"""Rate limit; takes 5% of one core of an AMD EPYC with chunks of 60 kB. Without it uvicorn takes a
whole core."""

_LONGEST_S: Final = 20.0
"""Time limit, enough for the largest upload at that rate; then the connection is closed."""

_PIECE_BYTES: Final = 1 << 18
"""Bytes read between two pauses."""


class UnreadBodyMiddleware:
    """ASGI middleware that discards unread bodies; see the module's docstring."""

    def __init__(
        self, app: App, bytes_per_s: float = _BYTES_PER_S, longest_s: float = _LONGEST_S
    ) -> None:
        self._app = app
        self._bytes_per_s = bytes_per_s
        self._longest_s = longest_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        is_read = False

        async def receive_and_note() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = not message.get("more_body", False)
            return message

        async def send_after_body(message: Message) -> None:
            nonlocal is_read
            if message["type"] == "http.response.start" and not is_read:
                headers = list(message.get("headers", ()))
                if not _closes(headers):
                    is_read = await self._discard(receive)
                    if not is_read:
                        message = {**message, "headers": [*headers, (b"connection", b"close")]}
            await send(message)

        await self._app(scope, receive_and_note, send_after_body)

    async def _discard(self, receive: Receive) -> bool:
        """Read and discard the body; return whether its end was reached in time."""
        end_s = time.monotonic() + self._longest_s
        piece_bytes = 0
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    message = await receive()
            except TimeoutError:
                return False
            if not message.get("more_body", False):
                return True
            piece_bytes += len(message.get("body", b""))
            if piece_bytes >= _PIECE_BYTES:
                await asyncio.sleep(piece_bytes / self._bytes_per_s)
                piece_bytes = 0
        return False


def _has_body(scope: Scope) -> bool:
    """Return whether the client sends a body without waiting for a 100 Continue."""
    headers = dict(scope["headers"])
    if b"expect" in headers:
        return False
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def _closes(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"connection" and b"close" in value for name, value in headers)
