"""Middleware before SGLang's check of keys: probes have no key, and malformed requests end here."""

from __future__ import annotations

from typing import ClassVar, Final

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_coserve.web.asgi import FramingMiddleware, route_path

PING_PATH: Final = "/ping"
_NO_BODY: Final = [(b"content-length", b"0")]


class PingMiddleware:
    """Answers ``GET /ping``: the server's process lives, and its event loop runs.

    SGLang's asks for a key, and says 503 while the server is unhealthy: a liveness probe would end
    an engine that only drains.
    """

    is_before_keys: ClassVar[bool] = True

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        is_probe = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if is_probe and route_path(scope) == PING_PATH:
            await send({"type": "http.response.start", "status": 200, "headers": _NO_BODY})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self._app(scope, receive, send)


def install_before_keys(app: FastAPI) -> None:
    """Add both middlewares; ``order_middleware`` puts them before SGLang's check of keys."""
    # The middleware added last runs first.
    app.add_middleware(PingMiddleware)
    app.add_middleware(FramingMiddleware)
