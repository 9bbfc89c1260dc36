"""The other side: lines that are sent to one engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Final, Self

import aiohttp
import httpx

from sglang_coserve.errors import ConfigError, RequestError
from sglang_coserve.http_lines.failures import (
    EngineLostError,
    EngineRefusesError,
    LineMovedError,
)
from sglang_coserve.http_lines.line_server import HEARTBEAT_S
from sglang_coserve.http_lines.messages import (
    LINES_PATH,
    EngineDescription,
    LineEvent,
    attempt_of,
    decode_message,
    encode_message,
    result_of,
)
from sglang_coserve.lines.backend import LineRequest, LineResult

__all__ = ["EngineConnection"]

_CONNECT_TIMEOUT_S: Final = 5.0
_ASK_TIMEOUT_S: Final = 10.0
"""For what an engine answers at once; its event loop may be late by some seconds."""

_KEEPALIVE_S: Final = 2.0
"""Servers close connections that were idle for 5 s; a line that is sent on one just then would look
as if the engine had died with it."""

_SILENT_S: Final = 4 * HEARTBEAT_S
"""An engine that has been silent for so long hangs."""

_KEYS: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_LINES_FAULT: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
_ELSEWHERE: Final = (HTTPStatus.CONFLICT, HTTPStatus.SERVICE_UNAVAILABLE)


class EngineConnection:
    """Speaks with the engine at ``url``, whose admin key is ``admin_key``.

    Raises:
        ConfigError: the address or the key cannot be used.
    """

    def __init__(self, url: str, admin_key: str, *, now_s: Callable[[], float] = time.time) -> None:
        self.url = _checked(url)
        if not admin_key.isascii() or not admin_key.isprintable():
            raise ConfigError("the engines' admin key has characters that no header can carry")
        self._now_s = now_s
        self._session = aiohttp.ClientSession(
            url,
            headers={"authorization": f"Bearer {admin_key}"},
            # As many connections as lines: how many those are is for others to decide.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(
                None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_SILENT_S
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection, which ends the attempts on them."""
        await self._session.close()

    async def describe(self) -> EngineDescription:
        """Ask what the engine serves.

        Raises:
            EngineLostError: it does not answer.
            EngineRefusesError: it answers something else.
        """
        content = await self.ask(LINES_PATH)
        try:
            return decode_message(content, EngineDescription)
        except RequestError as error:
            raise EngineRefusesError(f"{self.url}{LINES_PATH}: {error}") from None

    async def ask(self, path: str) -> bytes:
        """Return what the engine answers to GET.

        Raises:
            EngineLostError: it does not answer, or says that it cannot yet.
            EngineRefusesError: it answers with another error.
        """
        timeout = aiohttp.ClientTimeout(_ASK_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            async with self._session.get(path, timeout=timeout, allow_redirects=False) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineLostError(self._failed(error), had_the_line=False) from None
        if answer.status == HTTPStatus.OK:
            return content
        message = self._refused(path, answer.status, content)
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise EngineLostError(message, had_the_line=False)
        raise EngineRefusesError(message)

    async def run(
        self, request: LineRequest, model: str, on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        """Make one attempt at a line, as ``LineBackend.run``, with the engine's ``model``.

        Raises:
            LineMovedError: the engine does not have the line any more, and others may.
            EngineLostError: it cannot be reached, or has ended with the line in it.
            EngineRefusesError: it does not speak with us.
        """
        content = encode_message(attempt_of(request, model, self._now_s()))
        headers = {"content-type": "application/json"}
        try:
            async with self._session.post(
                LINES_PATH, data=content, headers=headers, allow_redirects=False
            ) as answer:
                if answer.status != HTTPStatus.OK:
                    return self._unserved(answer.status, await answer.read())
                async for line in _lines(answer.content):
                    event = decode_message(line, LineEvent)
                    if event.tokens:
                        on_tokens(event.tokens)
                    elif event.result is not None:
                        return result_of(event)
                    elif event.moved is not None:
                        raise LineMovedError(f"{self.url}: {event.moved}")
        except aiohttp.ClientConnectorError as error:
            raise EngineLostError(self._failed(error), had_the_line=False) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineLostError(self._failed(error), had_the_line=True) from None
        except RequestError as error:
            raise EngineRefusesError(f"{self.url}{LINES_PATH}: {error}") from None
        message = f"{self.url}: the answer ended in the middle"
        raise EngineLostError(message, had_the_line=True)

    def _unserved(self, status: int, content: bytes) -> LineResult:
        """Return the result of a line that the engine finds fault with."""
        message = self._refused(LINES_PATH, status, content)
        if status in _ELSEWHERE:
            raise LineMovedError(message)
        if status not in _LINES_FAULT:
            raise EngineRefusesError(message)
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
        return LineResult(status, "", {"error": error})

    def _refused(self, path: str, status: int, content: bytes) -> str:
        hint = ""
        if status in _KEYS:
            hint = ": its --admin-api-key is not the gateway's --engine-admin-key"
        elif status == HTTPStatus.NOT_FOUND:
            hint = ": it is no server of sglang_coserve, or has no --admin-api-key"
        text = content[:300].decode(errors="replace").strip()
        return f"{self.url}{path} answers HTTP {status}{hint} ({text})"

    def _failed(self, error: BaseException) -> str:
        return f"{self.url}: {str(error) or type(error).__name__}"


def _checked(url: str) -> str:
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url!r} is no address of an engine: {error}") from error
    if address.scheme not in ("http", "https") or not address.host or address.path != "/":
        raise ConfigError(f"{url!r} is no address of an engine: use http://HOST:PORT")
    return url


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines that are not empty, of any length."""
    parts: list[bytes] = []
    async for chunk in content.iter_any():
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line = b"".join((*parts, end))
            parts.clear()
            if line:
                yield line
        parts.append(rest)
