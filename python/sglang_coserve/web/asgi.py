"""Helpers shared by our ASGI middlewares and routes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, ClassVar, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ENGINE_PATHS: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/classify", "/v1/score", "/v1/rerank", "/v1/decisions"),
    *("/v1/systemone", "/v1/audio/transcriptions", "/generate", "/encode", "/classify"),
    *("/invocations", "/api/chat", "/api/generate", "/vertex_generate"),
)
"""Routes that bring requests to SGLang's engine, but for the WebSocket /v1/realtime: what it brings
is online."""

ROUTE_VARIABLES: Final = {
    "SGLANG_OLLAMA_CHAT_ROUTE": "/api/chat",
    "SGLANG_OLLAMA_GENERATE_ROUTE": "/api/generate",
    "SGLANG_OLLAMA_TAGS_ROUTE": "/api/tags",
    "SGLANG_OLLAMA_SHOW_ROUTE": "/api/show",
    "SGLANG_OLLAMA_ROOT_ROUTE": "/",
    "AIP_PREDICT_ROUTE": "/vertex_generate",
}
"""Variables of the environment with other paths for these routes of SGLang's."""


def known_paths(paths: Iterable[str]) -> Iterator[str]:
    """Yield the paths, and the paths that the environment names in their place."""
    for path in paths:
        yield path
        yield from (
            os.environ[name]
            for name, usual in ROUTE_VARIABLES.items()
            if usual == path and name in os.environ
        )


IDLE_CONNECTION_S: Final = 120
"""Time for which a server and a gateway keep an idle connection. Routers and clients keep theirs
for 50 to 90 s. Where a server's time is shorter, they send requests into connections that are just
being closed."""

_BYTES_PER_S: Final = 32 << 20
"""Rate limit; takes 5% of one core of an AMD EPYC with chunks of 60 kB. Without it uvicorn takes a
whole core."""

_LONGEST_S: Final = 20.0
"""Time limit, enough for the largest upload at that rate; then the connection is closed."""

_PIECE_BYTES: Final = 1 << 18
"""Bytes read between two pauses."""


def route_path(scope: Scope) -> str:
    """Return the path of a route: uvicorn puts ``--fastapi-root-path`` before it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


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


def openai_error(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> dict[str, dict[str, Any]]:
    """Return the JSON of an error in OpenAI's form."""
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        kind = "server_error"
    elif code == "insufficient_quota":
        kind = code  # As OpenAI says it.
    elif status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def send_error(send: Send, status: int, message: str) -> None:
    """Send an error response in OpenAI's form."""
    await send_json(send, status, openai_error(status, message))


async def send_json(
    send: Send, status: int, content: Any, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole response; ``headers`` come after those that say what the body is."""
    body = json.dumps(content).encode()
    own = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    start = [(name.encode(), value.encode()) for name, value in own.items()]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


class FramingMiddleware:
    """ASGI middleware that refuses a request whose end two readers may see in different places.

    A proxy that goes by ``Content-Length`` and a server that goes by ``Transfer-Encoding``, or the
    other way round, take the rest of one request for the next one (RFC 9112, 6.1). Add this
    middleware last, so that it runs before any that reads a body or checks a key.
    """

    is_before_keys: ClassVar[bool] = True
    """Runs before SGLang's check of keys, which is added later."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        is_old = scope.get("http_version") == "1.0"
        if scope["type"] == "http" and _is_ambiguous(scope["headers"], is_old=is_old):
            codings = "" if is_old else ", or Transfer-Encoding: chunked, and not both"
            message = f"send one Content-Length{codings}"
            await send_json(send, 400, openai_error(400, message), {"connection": "close"})
        else:
            await self._app(scope, receive, send)


def _is_ambiguous(headers: Iterable[tuple[bytes, bytes]], *, is_old: bool) -> bool:
    """``is_old`` says that the request is of HTTP/1.0, which knows no codings."""
    lengths = [value for name, value in headers if name.lower() == b"content-length"]
    codings = [value for name, value in headers if name.lower() == b"transfer-encoding"]
    if codings:
        return is_old or bool(lengths) or [each.strip().lower() for each in codings] != [b"chunked"]
    return len(lengths) > 1 or not all(each.isdigit() for each in lengths)


class UnreadBodyMiddleware:
    """ASGI middleware that discards the rest of a request body that is answered before its end.

    A body that is too large, or malformed at its beginning, is answered while the client is still
    sending it. If the server closed the connection, the client might never read the
    answer; if it reads on, as uvicorn does, the event loop is busy for as long as the client
    sends, perhaps forever. So the rest is read at a limited rate and
    for a limited time before the answer is sent.
    """

    def __init__(
        self, app: ASGIApp, bytes_per_s: float = _BYTES_PER_S, longest_s: float = _LONGEST_S
    ) -> None:
        self._app = app
        self._bytes_per_s = bytes_per_s
        self._longest_s = longest_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        is_read = False

        async def receive_and_note() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = not message.get("more_body", False)
            return message

        async def send_after_body(message: Message) -> None:
            nonlocal is_read
            if message["type"] == "http.response.start" and not is_read:
                headers = list(message.get("headers", ()))
                if not _closes(headers):
                    is_read = await self._discard(receive)
                    if not is_read:
                        message = {**message, "headers": [*headers, (b"connection", b"close")]}
            await send(message)

        await self._app(scope, receive_and_note, send_after_body)

    async def _discard(self, receive: Receive) -> bool:
        """Read and discard the body; return whether its end was reached in time."""
        end_s = time.monotonic() + self._longest_s
        piece_bytes = 0
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    message = await receive()
            except TimeoutError:
                return False
            if not message.get("more_body", False):
                return True
            piece_bytes += len(message.get("body", b""))
            if piece_bytes >= _PIECE_BYTES:
                await asyncio.sleep(piece_bytes / self._bytes_per_s)
                piece_bytes = 0
        return False


def _has_body(scope: Scope) -> bool:
    """Return whether the client sends a body without waiting for a 100 Continue."""
    headers = dict(scope["headers"])
    if b"expect" in headers:
        return False
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def _closes(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"connection" and b"close" in value for name, value in headers)
