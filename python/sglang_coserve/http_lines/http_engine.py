"""The gateway's side: lines that are sent to one engine, one request for each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Final, Protocol, Self, TypeVar

import aiohttp
import msgspec

from sglang_coserve.errors import ConfigError, RequestError
from sglang_coserve.http_lines.messages import (
    DELAYS_PATH,
    HAND_BACK_PATH,
    HEARTBEAT_S,
    LINES_PATH,
    RUN_HEADER,
    EngineDelays,
    EngineLostError,
    EngineRefusesError,
    EngineReport,
    HandBack,
    LineEvent,
    decode_message,
    encode_message,
)
from sglang_coserve.lines.backend import FailureKind, LineMovedError, LineRequest, LineResult
from sglang_coserve.network import http_address

_CONNECT_TIMEOUT_S: Final = 5.0
_ASK_TIMEOUT_S: Final = 10.0
"""For what an engine answers at once; its event loop may be late by some seconds."""

_SILENT_S: Final = 4 * HEARTBEAT_S
"""An engine that has been silent for so long hangs, or the connection to it does."""

_SLOWEST_BYTES_PER_S: Final = 128 << 10
"""A line may be sent as slowly as this before its engine counts as silent. A proxy takes the whole
line before the engine gets any of it."""

_MOST_MESSAGE_BYTES: Final = 256 << 20
"""Far more than any result: 100,000 tokens with 20 log-probabilities each are 200 MB."""

_MOST_TEXT_BYTES: Final = 1 << 20
"""Of an answer that is no stream of events."""

_KEEPALIVE_S: Final = 60.0
"""Half of the time for which engines keep idle connections (``asgi.IDLE_CONNECTION_S``)."""

_BAD_ATTEMPTS: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)

_WRONG_KEY: Final = ": its --admin-api-key is not the gateway's --engine-admin-key"
_HINTS: Final[Mapping[int, str]] = {
    HTTPStatus.UNAUTHORIZED: _WRONG_KEY,
    HTTPStatus.FORBIDDEN: _WRONG_KEY,
    HTTPStatus.NOT_FOUND: ": it is no server of sglang_coserve, or has no --admin-api-key",
}
"""How to mend what an engine refuses, by status."""

_HEADERS: Final = {"content-type": "application/json"}

_Message = TypeVar("_Message", bound=msgspec.Struct)


class AttemptListener(Protocol):
    """Hears of an attempt while it is made."""

    def began(self, run: str) -> None:
        """Hear that a run of the engine has the line."""

    def has_prompt(self, tokens: int) -> None:
        """Hear how long the prompt is, if the engine could hand the line back."""

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Hear of new tokens."""


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
        return await ask(self._session, self.url, path, _HINTS)

    async def _get(self, path: str, kind: type[_Message]) -> _Message:
        content = await self.ask(path)
        try:
            return decode_message(content, kind)
        except RequestError as error:
            raise EngineRefusesError(f"{self.url}{path}: {error}") from None

    # --- lines ---

    async def run(self, request: LineRequest, model: str, listener: AttemptListener) -> LineResult:
        """Make one attempt at a line, as ``LineBackend.run``, with the engine's ``model``.

        Raises:
            LineMovedError: the engine does not have the line any more, and others may.
            EngineLostError: the connection broke, or could not be made.
            EngineRefusesError: it does not speak with us.
        """
        content = encode_message(request.to_wire(model, time.time()))
        loop = asyncio.get_running_loop()
        try:
            async with (
                asyncio.timeout(_SILENT_S + len(content) / _SLOWEST_BYTES_PER_S) as silence,
                self._session.post(
                    LINES_PATH, data=content, headers=_HEADERS, allow_redirects=False
                ) as answer,
            ):
                if answer.status != HTTPStatus.OK:
                    return self._refused(answer, await _text(answer))
                listener.began(answer.headers.get(RUN_HEADER, ""))
                rest: list[bytes] = []
                async for chunk in answer.content.iter_any():
                    silence.reschedule(loop.time() + _SILENT_S)
                    for line in ended_lines(rest, chunk):
                        result = self._hear(line, listener)
                        if result is not None:
                            return result
                    if sum(map(len, rest)) > _MOST_MESSAGE_BYTES:
                        message = f"a message of more than {_MOST_MESSAGE_BYTES >> 20} MiB"
                        raise EngineRefusesError(f"{self.url}{LINES_PATH}: {message}")
            raise EngineLostError(f"{self.url}: the answer ended before its result")
        except TimeoutError as error:
            if isinstance(error, aiohttp.ClientError):  # It could not be connected to.
                raise EngineLostError(f"{self.url}: {_reason(error)}") from None
            message = f"{self.url} has said nothing for {_SILENT_S:g} s"
            raise EngineLostError(message) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLostError(f"{self.url}: {_reason(error)}") from None

    async def hand_back(self, attempt: str) -> bool:
        """Ask that the line of an attempt be handed back with its KV, as in a drain.

        ``run`` then raises ``LineMovedError``, unless the line ends before. Returns False if the
        engine has not taken the call. Only for engines of a pool: others end the attempt.
        """
        timeout = aiohttp.ClientTimeout(_ASK_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S)
        content = encode_message(HandBack(attempt))
        try:
            async with self._session.post(
                HAND_BACK_PATH, data=content, headers=_HEADERS, timeout=timeout
            ) as answer:
                return answer.ok
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    def _hear(self, line: bytes, listener: AttemptListener) -> LineResult | None:
        """Pass an event on to the listener; return the result if the event has one."""
        try:
            event = decode_message(line, LineEvent)
        except RequestError as error:
            raise EngineRefusesError(f"{self.url}{LINES_PATH}: {error}") from None
        if event.tokens:
            if event.prompt_tokens:
                listener.has_prompt(event.prompt_tokens)
            listener.add_tokens(event.tokens)
        elif event.moved is not None:
            raise LineMovedError(f"{self.url}: {event.moved}", event.kv)
        return event.result  # None, too, for an event that only newer gateways understand.

    def _refused(self, answer: aiohttp.ClientResponse, content: bytes) -> LineResult:
        """Return the outcome of a line that the engine, or a proxy before it, does not take.

        Raises:
            EngineLostError, EngineRefusesError: the line is not at fault.
        """
        status = answer.status
        if status not in _BAD_ATTEMPTS:
            raise _refusal(f"{self.url}{LINES_PATH}", status, content, _HINTS)
        text = content[:300].decode(errors="replace").strip()
        is_engines = answer.content_type == "application/json"
        if is_engines:
            return LineResult.refused(status, f"the engine refuses the line: {text}")
        message = f"what stands before {self.url} answers HTTP {status} ({text})"
        return LineResult.unserved("refused_by_proxy", message, FailureKind.FAILED)


async def ask(
    session: aiohttp.ClientSession, url: str, path: str, hints: Mapping[int, str]
) -> bytes:
    """Return what the engine or router at ``url`` answers to GET, at most about 1 MiB.

    ``hints`` say, by status, how to mend what is refused.

    Raises:
        EngineLostError: it does not answer, or says that it cannot yet.
        EngineRefusesError: it answers something else.
    """
    timeout = aiohttp.ClientTimeout(_ASK_TIMEOUT_S, sock_connect=session.timeout.sock_connect)
    address = url.rstrip("/") + path
    try:
        async with session.get(address, timeout=timeout, allow_redirects=False) as answer:
            content = await _text(answer)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineLostError(f"{url}: {_reason(error)}") from None
    if answer.status == HTTPStatus.OK:
        return content
    raise _refusal(address, answer.status, content, hints)


def _refusal(
    address: str, status: int, content: bytes, hints: Mapping[int, str]
) -> EngineLostError | EngineRefusesError:
    """Return the error of an answer other than 200: what it says, and how to mend it."""
    text = content[:300].decode(errors="replace").strip()
    message = f"{address} answers HTTP {status}{hints.get(status, '')} ({text})"
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


async def _text(answer: aiohttp.ClientResponse) -> bytes:
    """Return the beginning of an answer that is no stream of events."""
    parts: list[bytes] = []
    size_bytes = 0
    async for part in answer.content.iter_any():
        parts.append(part)
        size_bytes += len(part)
        if size_bytes > _MOST_TEXT_BYTES:
            break
    return b"".join(parts)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
