"""The other side: lines that are sent to one engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from typing import Final, Self, TypeVar

import aiohttp
import msgspec

from sglang_coserve.errors import ConfigError, RequestError, ServerError
from sglang_coserve.http_lines.messages import (
    DELAYS_PATH,
    GATHER_S,
    HEARTBEAT_S,
    LINES_PATH,
    EngineDelays,
    EngineDescription,
    EngineLostError,
    EngineRefusesError,
    LineCall,
    LineEvent,
    decode_message,
    encode_message,
    refusal_text,
)
from sglang_coserve.lines.backend import LineMovedError, LineRequest, LineResult
from sglang_coserve.network import http_address

_CONNECT_TIMEOUT_S: Final = 5.0
_ASK_TIMEOUT_S: Final = 10.0
"""For what an engine answers at once; its event loop may be late by some seconds."""

_KEEPALIVE_S: Final = 2.0
"""Servers close connections that were idle for 5 s; what is sent on one just then is lost."""

_Message = TypeVar("_Message", bound=msgspec.Struct)


class EngineConnection:
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
            reason = str(error) or type(error).__name__
            raise EngineLostError(f"{self.url}: {reason}", had_the_line=False) from None
        if answer.status == HTTPStatus.OK:
            return content
        message = refusal_text(f"{self.url}{path}", answer.status, content)
        # A proxy says it of an engine that is gone.
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
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
        return await self._stream.run(request, model, on_tokens, on_prompt)

    def ask_back(self, request: LineRequest) -> None:
        """Ask that a line that is being run be handed back with its KV, as in a drain.

        ``run`` then raises ``LineMovedError``, unless the line ends before. Only for engines that
        are of a pool: others take it for an abort.
        """
        if self._stream is not None:
            self._stream.ask_back(request)


def engine_address(url: str) -> str:
    """Return the address of an engine, without a slash at its end.

    Raises:
        ConfigError: it cannot be used.
    """
    address = http_address(url, "engine")
    if address.raw_path != b"/" or address.fragment:
        raise ConfigError(f"engine {url!r}: use http://HOST:PORT")
    return str(address).rstrip("/")


_SILENT_S: Final = 4 * HEARTBEAT_S
"""An engine that has been silent for so long hangs."""

_HEADERS: Final = {"content-type": "application/x-ndjson"}

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _SentAttempt:
    request: LineRequest
    on_tokens: Callable[[Sequence[int]], None]
    on_prompt: Callable[[int], None]
    result: asyncio.Future[LineResult]


class EngineStream:
    """One POST that lasts: calls go out in its body while events come in as its answer.

    Calls that are made soon after each other go together.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        """Open it. ``session`` is of the engine at ``url``, and brings its admin key."""
        self._session = session
        self._url = url
        self._ids = count(1)
        self._attempts: dict[int, _SentAttempt] = {}
        self._unsent: dict[int, bytes] = {}
        """Calls, by the ids of their attempts."""

        self._unsent_asks: list[bytes] = []
        """Calls for lines back, of attempts whose first call was sent."""

        self._has_unsent = asyncio.Event()
        self.has_ended = False
        """Whether another stream is needed."""

        self._serving = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """Close the connection, which ends the attempts on it."""
        self._serving.cancel()
        await asyncio.wait({self._serving})

    async def run(
        self,
        request: LineRequest,
        model: str,
        on_tokens: Callable[[Sequence[int]], None],
        on_prompt: Callable[[int], None],
    ) -> LineResult:
        """See ``EngineConnection.run``."""
        number, result = next(self._ids), asyncio.get_running_loop().create_future()
        self._send(LineCall(number, request.to_wire(model, time.time())))
        self._attempts[number] = _SentAttempt(request, on_tokens, on_prompt, result)
        try:
            found: LineResult = await result
            return found
        except asyncio.CancelledError:
            self._abort(number)
            raise
        finally:
            self._attempts.pop(number, None)

    def ask_back(self, request: LineRequest) -> None:
        """See ``EngineConnection.ask_back``. O(attempts)."""
        for number, attempt in self._attempts.items():
            if attempt.request is request and number not in self._unsent:
                self._unsent_asks.append(encode_message(LineCall(number, None, is_wanted=True)))
                self._has_unsent.set()
                return

    def _send(self, call: LineCall) -> None:
        self._unsent[call.id] = encode_message(call)
        self._has_unsent.set()

    def _abort(self, number: int) -> None:
        if self._unsent.pop(number, None) is None:
            self._send(LineCall(number, None))

    async def _serve(self) -> None:
        address = f"{self._url}{LINES_PATH}"
        try:
            async with asyncio.timeout(_SILENT_S) as silence:
                await self._converse(silence)
        except LineMovedError as error:
            message = str(error)
            self._end(lambda _: LineMovedError(message))
        except (EngineRefusesError, RequestError) as error:
            message = str(error) if isinstance(error, ServerError) else f"{address}: {error}"
            self._end(lambda _: EngineRefusesError(message))
        except aiohttp.ClientError as error:  # One of them is a TimeoutError, too.
            self._lose(str(error) or type(error).__name__)
        except TimeoutError:
            self._lose(f"it has said nothing for {_SILENT_S:g} s")
        except OSError as error:
            self._lose(str(error))
        except Exception as error:
            _log.exception("the conversation with %s has failed", address)
            self._lose(f"the conversation failed: {error!r}")
        finally:
            self._lose("the connection was closed here")

    async def _converse(self, silence: asyncio.Timeout) -> None:
        """Raises what ends the stream."""
        loop = asyncio.get_running_loop()
        async with self._session.post(
            LINES_PATH,
            data=self._calls(),
            headers=_HEADERS,
            allow_redirects=False,
            # So an engine that refuses need not read calls for as long as there are any.
            expect100=True,
        ) as answer:
            if answer.status != HTTPStatus.OK:
                text = refusal_text(answer.url.path, answer.status, await answer.read())
                is_elsewhere = answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR
                kind = LineMovedError if is_elsewhere else EngineRefusesError
                raise kind(f"{self._url}{text}")
            parts: list[bytes] = []
            async for chunk in answer.content.iter_any():
                silence.reschedule(loop.time() + _SILENT_S)
                for line in _lines(parts, chunk):
                    self._handle(decode_message(line, LineEvent))
        # It ends its answer when it has given back what it had: the rest it has never taken.
        raise LineMovedError(f"{self._url} takes no more lines on this connection")

    async def _calls(self) -> AsyncIterator[bytes]:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            calls = b"".join((*self._unsent.values(), *self._unsent_asks))
            self._unsent.clear()
            self._unsent_asks.clear()
            if calls:
                yield calls
                await asyncio.sleep(GATHER_S)

    def _handle(self, event: LineEvent) -> None:
        if event.fault is not None:
            raise EngineRefusesError(f"{self._url}{LINES_PATH}: {event.fault}")
        attempt = self._attempts.get(event.id)
        if attempt is None or attempt.result.done():
            return  # Nobody wants it any more.
        if event.tokens:
            try:
                if event.prompt_tokens:
                    attempt.on_prompt(event.prompt_tokens)
                attempt.on_tokens(event.tokens)
            except Exception as error:  # It ends this attempt, not all others with it.
                self._abort(event.id)
                attempt.result.set_exception(error)
        elif event.result is not None:
            attempt.result.set_result(event.result)
        else:
            attempt.result.set_exception(LineMovedError(f"{self._url}: {event.moved}", event.kv))

    def _lose(self, why: str) -> None:
        """End every attempt as lost; what was never sent the engine never had."""
        message = f"{self._url}: {why}"
        unsent = set(self._unsent)
        self._end(lambda number: EngineLostError(message, had_the_line=number not in unsent))

    def _end(self, error_of: Callable[[int], ServerError]) -> None:
        self.has_ended = True
        attempts = self._attempts.copy()
        self._attempts.clear()
        for number, attempt in attempts.items():
            if not attempt.result.done():
                attempt.result.set_exception(error_of(number))


def _lines(parts: list[bytes], chunk: bytes) -> Iterator[bytes]:
    """Yield the lines that end in ``chunk`` and are not empty; ``parts`` keeps the beginning."""
    *ends, rest = chunk.split(b"\n")
    for end in ends:
        line = b"".join((*parts, end))
        parts.clear()
        if line:
            yield line
    parts.append(rest)
