"""What is left of a body that was answered before its end.

A body that is too large, or malformed at its beginning, is answered while the client still
sends it. An HTTP server then has a choice of two evils. To close the connection takes the
answer from a client that has yet to read it; to read on, as uvicorn does, takes the event
loop for as long as a body comes, and one may come for ever. So the rest is read slowly and
for a bounded time before the answer is sent.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from sglang_coserve.asgi import App, Message, Receive, Scope, Send

__all__ = ["UnreadBodyMiddleware"]

_BYTES_PER_S: Final = 32 << 20
"""Takes a twentieth of one core of an AMD EPYC (chunks of 60 kB); at full speed uvicorn takes
all of it."""

_LONGEST_S: Final = 20.0
"""Enough for the rest of the largest upload at that speed; then the connection is closed."""

_PIECE_BYTES: Final = 1 << 18
"""Read between two pauses."""


class UnreadBodyMiddleware:
    """See the module's docstring."""

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
        """Read on; tell whether the body has come to its end."""
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
    """Tell whether a body comes without being asked for."""
    headers = dict(scope["headers"])
    if b"expect" in headers:
        return False
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def _closes(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"connection" and b"close" in value for name, value in headers)
