"""Reads and measures the bodies of SGLang's routes before anything parses them.

An ASGI middleware: a body that exceeds ``BodyLimits`` is answered with 413, judged from its raw
bytes, of which at most the limit is kept in memory.
"""

from __future__ import annotations

from typing import Any, Final

from sglang_coserve.asgi import App, Receive, Scope, Send, is_form, replay, send_error
from sglang_coserve.http_lines import LINES_PATH
from sglang_coserve.jsonl.body_limits import BodyLimits, BodyMeter, BodyTooLargeError

__all__ = ["RequestGateMiddleware", "body_bytes", "set_body_limits"]

_FREE_PREFIXES: Final = ("/v1/files", "/v1/batches", LINES_PATH)
"""Their routes bound what they read."""

_FREE_PATHS: Final = frozenset(
    {
        "/update_weights_from_tensor",
        "/load_lora_adapter_from_tensors",
    }
)
"""For operators only."""

_FORM_PATH: Final = "/v1/audio/transcriptions"
"""Takes a form, which is spooled to a file."""

_STATE: Final = "coserve_body_limits"
_SIZE: Final = "coserve_body_bytes"


def set_body_limits(app: Any, limits: BodyLimits) -> None:
    """Set the limits of request bodies for ``app``; until then the defaults apply."""
    setattr(app.state, _STATE, limits)


def body_bytes(scope: Scope) -> int:
    """Return the size of a body that passed the gate; 0 for any other."""
    size_bytes = scope.get(_SIZE, 0)
    return int(size_bytes)


class RequestGateMiddleware:
    """Refuses bodies that are too large; see the module's docstring."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if not _is_measured(scope):
            await self._app(scope, receive, send)
            return
        state = getattr(scope.get("app"), "state", None)
        meter = BodyMeter(getattr(state, _STATE, None) or BodyLimits())
        chunks: list[bytes] = []
        is_complete = False
        while not is_complete:
            message = await receive()
            if message["type"] != "http.request":
                return  # The client has disconnected.
            chunks.append(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            try:
                meter.take(chunks[-1])
            except BodyTooLargeError as error:
                await send_error(send, 413, str(error))
                return
        body = b"".join(chunks)
        await self._app({**scope, _SIZE: len(body)}, replay(body, receive), send)


def _is_measured(scope: Scope) -> bool:
    # Whatever its method: some of SGLang's routes parse the body of a GET, too.
    if scope["type"] != "http":
        return False
    path = scope["path"]
    if path in _FREE_PATHS or path.startswith(_FREE_PREFIXES):
        return False
    return path != _FORM_PATH or not is_form(scope)
