"""The other side: lines that are sent to one engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Final, Self, TypeVar

import aiohttp
import httpx
import msgspec

from sglang_coserve.errors import ConfigError, RequestError
from sglang_coserve.http_lines.engine_stream import EngineStream
from sglang_coserve.http_lines.messages import (
    DELAYS_PATH,
    LINES_PATH,
    EngineDelays,
    EngineDescription,
    EngineLostError,
    EngineRefusesError,
    attempt_of,
    decode_message,
    refusal_text,
)
from sglang_coserve.lines.backend import LineRequest, LineResult

__all__ = ["EngineConnection"]

_CONNECT_TIMEOUT_S: Final = 5.0
_ASK_TIMEOUT_S: Final = 10.0
"""For what an engine answers at once; its event loop may be late by some seconds."""

_KEEPALIVE_S: Final = 2.0
"""Servers close connections that were idle for 5 s; what is sent on one just then is lost."""

_Message = TypeVar("_Message", bound=msgspec.Struct)


class EngineConnection:
    """Speaks with the engine at ``url``, whose admin key is ``admin_key``.

    Raises:
        ConfigError: the address or the key cannot be used.
    """

    def __init__(self, url: str, admin_key: str) -> None:
        self.url = _checked(url)
        if not admin_key.isascii() or not admin_key.isprintable():
            raise ConfigError("the engines' admin key has characters that no header can carry")
        self._session = aiohttp.ClientSession(
            url,
            headers={"authorization": f"Bearer {admin_key}"},
            connector=aiohttp.TCPConnector(keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(None, sock_connect=_CONNECT_TIMEOUT_S),
        )
        self._stream: EngineStream | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection, which ends the attempts."""
        if self._stream is not None:
            await self._stream.close()
        await self._session.close()

    async def describe(self) -> EngineDescription:
        """Ask what the engine serves.

        Raises:
            EngineLostError: it does not answer.
            EngineRefusesError: it answers something else.
        """
        return await self._get(LINES_PATH, EngineDescription)

    async def delays(self) -> EngineDelays:
        """Ask by how much batches have delayed its online requests; raises as ``describe``."""
        return await self._get(DELAYS_PATH, EngineDelays)

    async def _get(self, path: str, kind: type[_Message]) -> _Message:
        content = await self.ask(path)
        try:
            return decode_message(content, kind)
        except RequestError as error:
            raise EngineRefusesError(f"{self.url}{path}: {error}") from None

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
        message = refusal_text(f"{self.url}{path}", answer.status, content)
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise EngineLostError(message, had_the_line=False)
        raise EngineRefusesError(message)

    async def run(
        self,
        request: LineRequest,
        model: str,
        on_tokens: Callable[[Sequence[int]], None],
        on_prompt: Callable[[int], None] = lambda _: None,
    ) -> LineResult:
        """Make one attempt at a line, as ``LineBackend.run``, with the engine's ``model``.

        Before the first tokens ``on_prompt`` is called with how many the prompt has, if the engine
        could hand the line back.

        Raises:
            LineMovedError: the engine does not have the line any more, and others may.
            EngineLostError: it cannot be reached, or has ended with the line in it.
            EngineRefusesError: it does not speak with us.
        """
        if self._stream is None or self._stream.has_ended:
            self._stream = EngineStream(self._session, self.url)
        attempt = attempt_of(request, model, time.time())
        return await self._stream.run(request, attempt, on_tokens, on_prompt)

    def ask_back(self, request: LineRequest) -> None:
        """Ask that a line that is being run be handed back with its KV, as in a drain.

        ``run`` then raises ``LineMovedError``, unless the line ends before. Only for engines that
        are of a pool: others take it for an abort.
        """
        if self._stream is not None:
            self._stream.ask_back(request)

    def _failed(self, error: BaseException) -> str:
        return f"{self.url}: {str(error) or type(error).__name__}"


def _checked(url: str) -> str:
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"{url!r} is no address of an engine: {error}") from error
    if address.scheme not in ("http", "https") or not address.host or address.path != "/":
        raise ConfigError(f"{url!r} is no address of an engine: use http://HOST:PORT")
    return url
