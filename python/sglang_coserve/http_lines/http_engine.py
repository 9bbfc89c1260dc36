"""The gateway's side: lines that are sent to one engine, one request for each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Final, Self, TypeVar

import aiohttp
import msgspec

from sglang_coserve.errors import ConfigError, RequestError
from sglang_coserve.http_lines.messages import (
    DELAYS_PATH,
    HAND_BACK_PATH,
    HEARTBEAT_S,
    LINES_PATH,
    EngineDelays,
    EngineLostError,
    EngineRefusesError,
    EngineReport,
    LineEvent,
    LineName,
    decode_message,
    encode_message,
    refusal_text,
)
from sglang_coserve.lines.backend import LineMovedError, LineRequest, LineResult
from sglang_coserve.network import http_address

_CONNECT_TIMEOUT_S: Final = 5.0
_ASK_TIMEOUT_S: Final = 10.0
"""For what an engine answers at once; its event loop may be late by some seconds."""

_SILENT_S: Final = 4 * HEARTBEAT_S
"""An engine that has been silent for so long hangs, or the connection to it does."""

_KEEPALIVE_S: Final = 60.0
"""Half of the time for which engines keep idle connections (``asgi.IDLE_CONNECTION_S``)."""

_BAD_ATTEMPTS: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)

_HEADERS: Final = {"content-type": "application/json"}

_Message = TypeVar("_Message", bound=msgspec.Struct)

_log = logging.getLogger(__name__)


class HttpEngine:
    """Speaks with the engine at ``url``, whose admin key is ``admin_key``.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(self, url: str, admin_key: str) -> None:
        engine_address(url)
        self.url = url
        self._session = aiohttp.ClientSession(
            url,
            headers={"authorization": f"Bearer {admin_key}"},
            # The number of lines bounds the connections.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(None, sock_connect=_CONNECT_TIMEOUT_S),
        )
        self._handing_back: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection, which ends the attempts."""
        await self._session.close()

    # --- asking ---

    async def report(self) -> EngineReport:
        """Ask what the engine serves, and how it stands.

        Raises:
            EngineLostError: it does not answer, or says that it cannot yet.
            EngineRefusesError: it answers something else.
        """
        return await self._get(LINES_PATH, EngineReport)

    async def delays(self) -> EngineDelays:
        """Ask by how much batches have delayed its online requests; raises as ``report``."""
        return await self._get(DELAYS_PATH, EngineDelays)

    async def ask(self, path: str) -> bytes:
        """Return what the engine answers to GET; raises as ``report``."""
        timeout = aiohttp.ClientTimeout(_ASK_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            async with self._session.get(path, timeout=timeout, allow_redirects=False) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineLostError(f"{self.url}: {_reason(error)}") from None
        if answer.status == HTTPStatus.OK:
            return content
        raise self._error(path, answer.status, content)

    async def _get(self, path: str, kind: type[_Message]) -> _Message:
        content = await self.ask(path)
        try:
            return decode_message(content, kind)
        except RequestError as error:
            raise EngineRefusesError(f"{self.url}{path}: {error}") from None

    # --- lines ---

    async def run(
        self,
        request: LineRequest,
        model: str,
        on_tokens: Callable[[Sequence[int]], None],
        on_prompt: Callable[[int], None] = lambda _: None,
    ) -> LineResult:
        """Make one attempt at a line, as ``LineBackend.run``, with the engine's ``model``.

        ``on_prompt`` is called before the first tokens with the length of the prompt, if the engine
        could hand the line back.

        Raises:
            LineMovedError: the engine does not have the line any more, and others may.
            EngineLostError: the connection broke, or could not be made.
            EngineRefusesError: it does not speak with us.
        """
        content = encode_message(request.to_wire(model, time.time()))
        loop = asyncio.get_running_loop()
        try:
            async with (
                asyncio.timeout(_SILENT_S) as silence,
                self._session.post(
                    LINES_PATH, data=content, headers=_HEADERS, allow_redirects=False
                ) as answer,
            ):
                if answer.status != HTTPStatus.OK:
                    return self._refused(answer.status, await answer.read())
                rest: list[bytes] = []
                async for chunk in answer.content.iter_any():
                    silence.reschedule(loop.time() + _SILENT_S)
                    for line in ended_lines(rest, chunk):
                        event = self._event(line)
                        if event.tokens:
                            if event.prompt_tokens:
                                on_prompt(event.prompt_tokens)
                            on_tokens(event.tokens)
                        elif event.result is not None:
                            return event.result
                        else:
                            raise LineMovedError(f"{self.url}: {event.moved}", event.kv)
            raise EngineLostError(f"{self.url}: the answer ended before its result")
        except TimeoutError as error:
            if isinstance(error, aiohttp.ClientError):  # It could not be connected to.
                raise EngineLostError(f"{self.url}: {_reason(error)}") from None
            message = f"{self.url} has said nothing for {_SILENT_S:g} s"
            raise EngineLostError(message) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLostError(f"{self.url}: {_reason(error)}") from None

    def hand_back(self, request: LineRequest) -> None:
        """Ask that a line that is being run be handed back with its KV, as in a drain.

        ``run`` then raises ``LineMovedError``, unless the line ends before. Only for engines that
        are of a pool: others end the attempt.
        """
        asking = asyncio.create_task(self._hand_back(LineName(request.batch_id, request.line)))
        self._handing_back.add(asking)
        asking.add_done_callback(self._handing_back.discard)

    async def _hand_back(self, line: LineName) -> None:
        timeout = aiohttp.ClientTimeout(_ASK_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S)
        content = encode_message(line)
        try:
            async with self._session.post(
                HAND_BACK_PATH, data=content, headers=_HEADERS, timeout=timeout
            ):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # The line goes on where it is.
            _log.warning("%s does not hand a line back: %s", self.url, _reason(error))

    def _event(self, line: bytes) -> LineEvent:
        try:
            return decode_message(line, LineEvent)
        except RequestError as error:
            raise EngineRefusesError(f"{self.url}{LINES_PATH}: {error}") from None

    def _refused(self, status: int, content: bytes) -> LineResult:
        """Return the outcome of a line that the engine cannot take, whatever its state.

        Raises:
            EngineLostError, EngineRefusesError: the line is not at fault.
        """
        if status not in _BAD_ATTEMPTS:
            raise self._error(LINES_PATH, status, content)
        text = content[:300].decode(errors="replace").strip()
        return LineResult.refused(status, f"the engine refuses the line: {text}")

    def _error(
        self, path: str, status: int, content: bytes
    ) -> EngineLostError | EngineRefusesError:
        message = refusal_text(f"{self.url}{path}", status, content)
        # Proxies answer so for an engine that is gone.
        is_gone = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return EngineLostError(message) if is_gone else EngineRefusesError(message)


def engine_address(url: str) -> str:
    """Return the address of an engine, without a slash at its end.

    Raises:
        ConfigError: it cannot be used.
    """
    address = http_address(url, "engine")
    if address.raw_path != b"/" or address.fragment:
        raise ConfigError(f"engine {url!r}: use http://HOST:PORT")
    return str(address).rstrip("/")


def ended_lines(rest: list[bytes], chunk: bytes) -> Iterator[bytes]:
    """Yield the lines that end in ``chunk`` and are not empty; ``rest`` keeps the beginning of the
    next line."""
    *ends, last = chunk.split(b"\n")
    for end in ends:
        line = b"".join((*rest, end))
        rest.clear()
        if line:
            yield line
    rest.append(last)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
