"""Clients' key, as a single server checks it."""

from __future__ import annotations

from secrets import compare_digest
from typing import Final

from sglang_coserve.asgi import App, Receive, Scope, Send, send_error
from sglang_coserve.batch.routes import PAGE_PATH, VIEW_PATH

__all__ = ["KeyCheck"]

_OPEN: Final = ("/health", "/ping", "/metrics", PAGE_PATH, VIEW_PATH)
"""The page holds nothing of the gateway; the view checks keys itself: operators see more of it."""

_OPERATORS: Final = "/coserve/batches"
"""Have a key of their own, which the routes check."""


class KeyCheck:
    """An ASGI middleware: refuses who does not bring ``api_key``."""

    def __init__(self, app: App, api_key: str) -> None:
        self._app = app
        self._wanted = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "http" and not self._is_open(scope["path"]):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not compare_digest(given, self._wanted):
                await send_error(send, 401, "send the gateway's --api-key as a bearer token")
                return
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in _OPEN or path == _OPERATORS or path.startswith(f"{_OPERATORS}/")
