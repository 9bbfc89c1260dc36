"""Clients' key, as a single server checks it."""

from __future__ import annotations

from typing import Final

from sglang_coserve.asgi import App, Receive, Scope, Send, bearer_key, is_same_key, send_error
from sglang_coserve.batch.routes import PAGE_PATH, VIEW_PATH
from sglang_coserve.errors import RequestError

__all__ = ["KeyCheck"]

_OPEN: Final = ("/health", "/ping", "/metrics", PAGE_PATH, VIEW_PATH)
"""The page holds nothing of the gateway; the view checks keys itself: operators see more of it."""

_OPERATORS: Final = "/coserve/batches"
"""Have a key of their own, which the routes check."""


class KeyCheck:
    """An ASGI middleware: refuses who does not bring ``api_key``."""

    def __init__(self, app: App, api_key: str) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "http" and not self._is_open(scope["path"]):
            try:
                key = bearer_key(scope["headers"])
            except RequestError as error:
                await send_error(send, 400, str(error))
                return
            if not is_same_key(key, self._api_key):
                await send_error(send, 401, "send the gateway's --api-key as a bearer token")
                return
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in _OPEN or path == _OPERATORS or path.startswith(f"{_OPERATORS}/")
