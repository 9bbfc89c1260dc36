"""``/coserve/lines``: an engine serves lines of batches that other processes keep.

One request is one attempt at one line. The answer is JSON lines: tokens as they are generated, and
then the result. Closing the connection ends the attempt.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request, Response
from starlette.types import Receive, Scope, Send

from sglang_coserve.batch.errors import BatchApiNotReadyError
from sglang_coserve.http_lines.messages import (
    GATHER_S,
    HEARTBEAT,
    HEARTBEAT_S,
    LINES_PATH,
    RUN_HEADER,
    EngineDelays,
    EngineReport,
    HandBack,
    LineEvent,
    decode_message,
    encode_message,
)
from sglang_coserve.jsonl.body_limits import BodyLimits, BodyMeter, BodyTooLargeError
from sglang_coserve.lines.backend import (
    Backend,
    LineMovedError,
    LineRequest,
    LineResult,
    MovedKv,
)
from sglang_coserve.told_faults import without_directories
from sglang_coserve.web.keys import operator_router
from sglang_coserve.web.routes import OpenAIRoute, endpoints_of

_FRAME_BYTES: Final = 1 << 20
"""More than a ``LineRequest`` has beside the body and the tokens."""

_ENGINE_CHANGES: Final = "the engine's model is being exchanged"
_GIVEN_UP: Final = "the engine has given the line up"
_ASKED_BACK: Final = "it was asked for"

_HAND_BACK_S: Final = 30.0
"""Longest wait for an attempt that the engine said it would hand back. The engine has bounds of its
own, and keeps them unless it hangs."""

_NDJSON: Final = b"application/x-ndjson"

_log = logging.getLogger(__name__)


class _Attempt:
    """One attempt at a line: the request in the engine, and what there is to say of it."""

    def __init__(self, backend: Backend, request: LineRequest) -> None:
        """Begin the attempt."""
        self._backend = backend
        self.request = request
        self._tokens: list[int] = []
        self._prompt_tokens: int | None = None
        self._moved: str | None = None
        self._has_changed = asyncio.Event()
        self._task = asyncio.ensure_future(backend.run(request, self._add_tokens))
        self._task.add_done_callback(lambda _: self._has_changed.set())

    def hand_back(self, why: str) -> None:
        """End the attempt: the line goes on in another engine, after its tokens so far."""
        if self._moved is not None or self._task.done():
            return
        self._moved = why
        if self._backend.hand_back(self.request):
            asyncio.get_running_loop().call_later(_HAND_BACK_S, self._task.cancel)
        else:
            self._task.cancel()

    async def answer(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send the events of the attempt, the end included, and signs of life between them."""
        while not self._task.done():
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._has_changed.wait()
            except TimeoutError:
                await send(HEARTBEAT)
                continue
            if not self._task.done():
                await asyncio.sleep(GATHER_S)
            self._has_changed.clear()
            if not self._task.done():
                await send(self._new_tokens())
        await send(self._new_tokens() + self._end())

    async def close(self) -> None:
        """End the attempt, unless it has ended; wait until the engine does not have the line."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()

    def _add_tokens(self, token_ids: Sequence[int]) -> None:
        self._tokens.extend(token_ids)
        self._has_changed.set()

    def _new_tokens(self) -> bytes:
        if not self._tokens:
            return b""
        prompt_tokens = 0
        if self._prompt_tokens is None:
            self._prompt_tokens = self._backend.prompt_tokens(self.request)
            prompt_tokens = self._prompt_tokens or 0
        event = LineEvent(tuple(self._tokens), prompt_tokens)
        self._tokens.clear()
        return encode_message(event)

    def _end(self) -> bytes:
        kv: MovedKv | None = None
        try:
            return encode_message(LineEvent(result=self._task.result()))
        except asyncio.CancelledError:
            pass
        except LineMovedError as error:
            kv = error.kv
        except Exception as error:
            _log.exception("line %d of %s failed", self.request.line, self.request.batch_id)
            result = LineResult.refused(
                500, f"the engine failed: {without_directories(repr(error))}"
            )
            return encode_message(LineEvent(result=result))
        return encode_message(LineEvent(moved=self._moved or _GIVEN_UP, kv=kv))


class LineServer:
    """Serves attempts at lines with ``backend``. Lives on its event loop."""

    def __init__(
        self,
        backend: Backend,
        report: Callable[[EngineReport], Awaitable[EngineReport]] | None = None,
    ) -> None:
        """Serve no line yet.

        Args:
            backend: The engine.
            report: Adds to a report what only the engine's schedulers know; None if nothing does.
        """
        self._backend = backend
        self._complete_report = report
        self._run = secrets.token_hex(8)
        self._closed: str | None = None
        self._attempts: set[_Attempt] = set()
        backend.when_changing(lambda: self.take_out(_ENGINE_CHANGES))

    @property
    def refuses(self) -> str | None:
        """Why no lines are taken now; None while lines are taken."""
        if self._closed is None and self._backend.is_changing:
            return _ENGINE_CHANGES
        return self._closed or self._backend.stalled_by

    @property
    def num_in_flight(self) -> int:
        """Attempts that are being made."""
        return len(self._attempts)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of an answer with events. nginx passes events on one by one if asked so."""
        return [
            (b"content-type", _NDJSON),
            (b"x-accel-buffering", b"no"),
            (RUN_HEADER.encode(), self._run.encode()),
        ]

    @property
    def request_limits(self) -> BodyLimits:
        """Limits of one request: a line, and the tokens after which it continues."""
        limits = self._backend.limits
        kv = MovedKv.__dataclass_fields__
        return BodyLimits(
            2 * limits.max_bytes + _FRAME_BYTES,
            2 * limits.max_values,
            limits.max_objects + 2,
            limits.max_keys + len(LineRequest.__struct_fields__) + len(kv),
        )

    async def report(self) -> EngineReport:
        """Return what the engine is, and how it stands."""
        backend = self._backend
        report = EngineReport(
            run=self._run,
            model=backend.model,
            models=backend.model_names,
            endpoints=tuple(sorted(backend.endpoints)),
            limits=backend.limits,
            refuses=self.refuses,
            lines=self.num_in_flight,
            expected_tokens_per_s=backend.load().offline_tokens_per_s,
        )
        return report if self._complete_report is None else await self._complete_report(report)

    async def delays(self) -> EngineDelays:
        """Return by how much batches have delayed online requests; the schedulers are asked."""
        delays_s = await self._backend.online_delays_s()
        return EngineDelays(self._run, None if delays_s is None else dict(delays_s))

    def close(self, why: str) -> None:
        """Give all lines back, each after its tokens so far, and take no more."""
        self._closed = why
        self.take_out(why)

    def take_out(self, why: str) -> None:
        """Give all lines back, each after its tokens so far."""
        for attempt in self._attempts:
            attempt.hand_back(why)

    def open(self) -> None:
        """Take lines again after ``close``."""
        self._closed = None

    def hand_back(self, name: str) -> None:
        """Give the line of an attempt back with its KV, if the attempt is under way."""
        for attempt in self._attempts:
            if attempt.request.attempt == name:
                attempt.hand_back(_ASKED_BACK)

    def why_not(self, request: LineRequest) -> str | None:
        """Return why an attempt is not made here now; None if it is made."""
        model = self._backend.model
        if self.refuses is None and request.model != model:
            return f"the engine has the model {model}, and the line is of {request.model}"
        return self.refuses

    async def serve(self, request: LineRequest, receive: Receive, send: Send) -> None:
        """Make one attempt, and answer it, until it ends or the client closes the connection."""

        async def send_part(content: bytes) -> None:
            await send({"type": "http.response.body", "body": content, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        if (why := self.why_not(request)) is not None:
            await send_part(encode_message(LineEvent(moved=why)))
        else:
            await self._serve(request.from_wire(time.time()), receive, send_part)
        await send({"type": "http.response.body"})

    async def _serve(
        self, request: LineRequest, receive: Receive, send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        attempt = _Attempt(self._backend, request)
        self._attempts.add(attempt)
        answering = asyncio.ensure_future(attempt.answer(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            answering.cancel()
            gone.cancel()
            self._attempts.remove(attempt)
            await attempt.close()


async def _until_gone(receive: Receive) -> None:
    """Wait until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _LineResponse(Response):
    """The answer to an attempt."""

    def __init__(self, server: LineServer, attempt: LineRequest) -> None:
        super().__init__()
        self._server = server
        self._attempt = attempt

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        await self._server.serve(self._attempt, receive, send)


_STATE: Final = "coserve_line_server"
_STARTING: Final = "the engine does not serve lines yet"

router = operator_router(LINES_PATH, tag="gateway", route_class=OpenAIRoute)


def add_line_routes(app: FastAPI) -> list[Any]:
    """Add the routes to ``app``; return the functions behind them, which need the admin key.

    Until ``set_line_server`` they answer 503.
    """
    app.router.routes.extend(router.routes)
    return endpoints_of(router)


def set_line_server(app: FastAPI, server: LineServer) -> None:
    """Say what the routes of ``app`` serve lines with."""
    setattr(app.state, _STATE, server)


@router.get("")
async def report_engine(request: Request) -> Response:
    """Say what the engine serves, how much it has to do, and whether it takes lines now."""
    report = await _server(request).report()
    return Response(encode_message(report), media_type="application/json")


@router.get("/delays")
async def show_delays(request: Request) -> Response:
    """Say by how many seconds each batch has delayed online requests since the start."""
    return Response(encode_message(await _server(request).delays()), media_type="application/json")


@router.post("")
async def serve_line(request: Request) -> Response:
    """Make one attempt at a line: its tokens and its result as JSON lines."""
    server = _server(request)
    content = await _body(request, server.request_limits)
    return _LineResponse(server, decode_message(content, LineRequest))


@router.post("/hand_back")
async def hand_line_back(request: Request) -> Response:
    """Have a line end with its KV, to go on in another engine."""
    server = _server(request)
    content = await _body(request, server.request_limits)
    server.hand_back(decode_message(content, HandBack).attempt)
    return Response(status_code=HTTPStatus.NO_CONTENT)


async def _body(request: Request, limits: BodyLimits) -> bytes:
    """Return the body of a request.

    Raises:
        HTTPException: the body is beyond ``limits`` (413).
        ClientDisconnect: the client has hung up before the end.
    """
    meter, parts = BodyMeter(limits), list[bytes]()
    async for part in request.stream():
        try:
            meter.take(part)
        except BodyTooLargeError as error:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error)) from None
        parts.append(part)
    return b"".join(parts)


def _server(request: Request) -> LineServer:
    server: LineServer | None = getattr(request.app.state, _STATE, None)
    if server is None:
        raise BatchApiNotReadyError(_STARTING)
    return server
