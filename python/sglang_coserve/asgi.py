"""Helpers shared by our ASGI middlewares and routes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from http import HTTPStatus
from secrets import compare_digest
from typing import Any, TypeAlias

from sglang_coserve.errors import RequestError

__all__ = [
    "App",
    "Message",
    "Receive",
    "Scope",
    "Send",
    "bearer_key",
    "error_content",
    "is_form",
    "is_same_key",
    "replay",
    "send_error",
    "send_json",
]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_KINDS = {400: "BadRequestError"}


def bearer_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the key in ``Authorization: Bearer KEY``; None without one.

    The only reader of that header: whoever checks a key and whoever asks whose it is mean the same.

    Args:
        headers: Of an ASGI scope.

    Raises:
        RequestError: there is more than one such header.
    """
    values = [value for name, value in headers if name.lower() == b"authorization"]
    if len(values) > 1:
        raise RequestError(f"{len(values)} Authorization headers: send one")
    scheme, _, key = values[0].partition(b" ") if values else (b"", b"", b"")
    return (key.strip().decode("latin-1") or None) if scheme.lower() == b"bearer" else None


def is_same_key(key: str | None, expected: str) -> bool:
    """Return whether a client's key is the expected one, in a time that tells nothing about it."""
    return key is not None and compare_digest(key.encode(), expected.encode())


def is_form(scope: Scope) -> bool:
    """Return whether the body is a form with files, which must not be read as a whole."""
    types = [value for name, value in scope["headers"] if name.lower() == b"content-type"]
    return any(value.lower().startswith(b"multipart/") for value in types)


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
    await send_json(send, status, error_content(status, message))


async def send_json(
    send: Send, status: int, content: Any, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole response; ``headers`` come after those that say what the body is."""
    body = json.dumps(content).encode()
    own = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    start = [(name.encode(), value.encode()) for name, value in own.items()]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})
