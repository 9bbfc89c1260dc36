"""Helpers shared by our ASGI middlewares."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, TypeAlias

__all__ = ["App", "Message", "Receive", "Scope", "Send", "error_content", "replay", "send_error"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_KINDS = {400: "BadRequestError"}


def replay(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI ``receive`` that yields ``body`` once, then what the client sends next."""
    pending = [body]

    async def replayed() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replayed


def error_content(status: int, message: str) -> dict[str, Any]:
    """Return the JSON of an error in the format of SGLang's OpenAI routes."""
    return {
        "object": "error",
        "message": message,
        "type": _KINDS.get(status, HTTPStatus(status).phrase),
        "param": None,
        "code": status,
    }


async def send_error(send: Send, status: int, message: str) -> None:
    """Send an error response in the format of SGLang's OpenAI routes."""
    body = json.dumps(error_content(status, message)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
