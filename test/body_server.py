"""A real HTTP server that answers each body with its length, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from sglang_coserve.asgi import send_error
from waiting import eventually

TIMEOUT_S = 30.0


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
    body_server = BodyServer()
    config = uvicorn.Config(
        wrapped(body_server.app), interface="asgi3", port=0, log_level="error", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive())
        body_server.port = server.servers[0].sockets[0].getsockname()[1]
        yield body_server
    finally:
        server.should_exit = True
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
