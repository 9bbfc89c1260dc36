"""An application behind a real socket, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from waiting import eventually

TIMEOUT_S = 30.0


@contextmanager
def app_thread(app: Any, port: int = 0, **settings: Any) -> Iterator[int]:
    """Serve on loopback, on a free port unless told which; yields the port."""
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", **settings))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive())
        assert server.started, "the server did not start"
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the server did not stop"
