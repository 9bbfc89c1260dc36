"""Answers refused requests with 503 and ``Retry-After``, including streams.

SGLang answers a stream with 200 before it knows, and reports a refusal in the first event.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, Final

from sglang_coserve.asgi import Message, Send, send_error

__all__ = ["OverloadAnswer"]

_OVERLOADED: Final = HTTPStatus.SERVICE_UNAVAILABLE.value
_EVENT: Final = b"data: "
_RETRY_AFTER: Final = (b"retry-after", b"1")
"""One second, the smallest value of the header. Refusing costs next to nothing, so clients may
retry early."""


class OverloadAnswer:
    """An ASGI ``send`` that delays the start of a stream until its first event.

    If that event reports an overload, an error response is sent instead of the stream.
    Otherwise the stream passes unchanged.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._is_refused = False

    async def __call__(self, message: Message) -> None:
        """Forward one message, or delay it."""
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            if message["status"] == _OVERLOADED:
                message = _with_retry_after(message)
            elif _is_stream(message):
                self._start = message
                return
        elif self._start is not None:
            start, self._start = self._start, None
            refusal = _refusal(message.get("body", b""))
            if refusal is not None:
                self._is_refused = True
                await send_error(OverloadAnswer(self._send), _OVERLOADED, refusal)
                return
            await self._send(start)
        await self._send(message)


def _with_retry_after(message: Message) -> Message:
    headers = list(message["headers"])
    if all(name.lower() != _RETRY_AFTER[0] for name, _ in headers):
        headers.append(_RETRY_AFTER)
    return dict(message, headers=headers)


def _is_stream(message: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in message["headers"]
    )


def _refusal(body: bytes) -> str | None:
    """Return the message of the first event if it reports an overload, else None."""
    if not body.startswith(_EVENT) or str(_OVERLOADED).encode() not in body:
        return None
    try:
        event = json.loads(body.partition(b"\n\n")[0].removeprefix(_EVENT))
    except ValueError:
        return None
    for error, code in ((_within(event, "error"), "code"), (_finish(event), "status_code")):
        if error.get(code) == _OVERLOADED:
            return str(error.get("message"))
    return None


def _finish(event: Any) -> dict[str, Any]:
    """Return the finish reason in an event of ``/generate``, or an empty dict."""
    return _within(_within(event, "meta_info"), "finish_reason")


def _within(value: Any, key: str) -> dict[str, Any]:
    inner = value.get(key) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else {}
