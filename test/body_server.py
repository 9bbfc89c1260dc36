"""A real HTTP server that answers each body with its length, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from app_thread import app_thread
from sglang_coserve.web.asgi import send_error


class BodyServer:
    """Refuses ``/refused`` at once, and takes everything else."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        """What came of bodies at a time."""

        self.port = 0

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/refused":
            await send_error(send, 413, "too large")
            return
        size_bytes, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            self.parts.append(message.get("body", b""))
            size_bytes += len(self.parts[-1])
            more = message.get("more_body", False)
        await send_error(send, 400, f"{size_bytes} bytes")


@contextmanager
def serving(wrapped: Callable[[Any], Any] = lambda app: app) -> Iterator[BodyServer]:
    """Serve on a free port of loopback; ``wrapped`` puts a middleware before the application."""
    server = BodyServer()
    with app_thread(wrapped(server.app), interface="asgi3", lifespan="off") as server.port:
        yield server
