"""The engine's side: attempts at lines, each for as long as its connection lives."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Final

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sglang_coserve.http_lines.messages import (
    HEARTBEAT,
    EngineDescription,
    LineAttempt,
    LineEvent,
    description_of,
    encode_message,
    event_of,
    request_of,
)
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.lines.backend import Backend, LineRequest, LineResult

__all__ = ["HEARTBEAT_S", "LineServer"]

HEARTBEAT_S: Final = 5.0
"""How long an engine that has nothing to say of a line is silent."""

_FRAME_BYTES: Final = 1 << 20
"""What an attempt's message has beside the body and the tokens, more than is needed."""

_ENGINE_CHANGES: Final = "the engine's model is being exchanged"

_log = logging.getLogger(__name__)


class LineServer:
    """Serves attempts at lines with ``backend``. Lives on its event loop."""

    def __init__(
        self,
        backend: Backend,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._backend = backend
        self._heartbeat_s = heartbeat_s
        self._now_s = now_s
        self._closed: str | None = None
        self._running: dict[asyncio.Task[LineResult], str | None] = {}
        backend.when_changing(lambda: self._take_out(_ENGINE_CHANGES))

    @property
    def refuses(self) -> str | None:
        """Why no lines are taken now; None when they are."""
        return self._closed or (_ENGINE_CHANGES if self._backend.is_changing else None)

    @property
    def num_in_flight(self) -> int:
        """Attempts that are being made."""
        return len(self._running)

    @property
    def message_limits(self) -> BodyLimits:
        """What the message of an attempt may be: a line, and the tokens that it goes on after."""
        limits = self._backend.limits
        return BodyLimits(
            2 * limits.max_bytes + _FRAME_BYTES,
            2 * limits.max_values,
            limits.max_objects + 1,
            limits.max_keys + len(LineAttempt.__struct_fields__),
        )

    def description(self) -> EngineDescription:
        """Say what the engine serves."""
        return description_of(self._backend, self.refuses)

    def close(self, why: str) -> None:
        """Give all lines back, each after what the engine has generated of it; take no more."""
        self._closed = why
        self._take_out(why)

    def open(self) -> None:
        """Take lines again after ``close``."""
        self._closed = None

    def answer(self, attempt: LineAttempt) -> Response:
        """Return the response that makes ``attempt``."""
        if self.refuses is not None:
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, self.refuses)
        model = self._backend.model
        if attempt.model != model:
            message = f"the engine has the model {model}, and the line is of {attempt.model}"
            return _refusal(HTTPStatus.CONFLICT, message)
        return _Attempt(self, request_of(attempt, self._now_s()))

    def _take_out(self, why: str) -> None:
        """End every attempt: the lines go on elsewhere."""
        for task, known in list(self._running.items()):
            if known is None:
                self._running[task] = why
                task.cancel()

    async def serve(self, request: LineRequest, receive: Receive, send: Send) -> None:
        """Make an attempt, and tell of it until it or the connection ends."""
        tokens: list[int] = []
        changed = asyncio.Event()

        def heard(token_ids: Sequence[int]) -> None:
            tokens.extend(token_ids)
            changed.set()

        attempt = asyncio.ensure_future(self._backend.run(request, heard))
        gone = asyncio.ensure_future(_disconnected(receive))
        self._running[attempt] = None
        for task in (attempt, gone):
            task.add_done_callback(lambda _: changed.set())
        try:
            while not attempt.done():
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        await changed.wait()
                except TimeoutError:
                    await send(_part(HEARTBEAT))
                    continue
                changed.clear()
                if gone.done():
                    return
                if tokens:
                    event = LineEvent(tokens=tuple(tokens))
                    tokens.clear()
                    await send(_part(encode_message(event)))
            last = await asyncio.to_thread(encode_message, self._end(attempt, request))
            if tokens:
                last = encode_message(LineEvent(tokens=tuple(tokens))) + last
            await send({"type": "http.response.body", "body": last})
        finally:
            gone.cancel()
            attempt.cancel()
            await asyncio.wait({gone, attempt})
            del self._running[attempt]

    def _end(self, attempt: asyncio.Task[LineResult], request: LineRequest) -> LineEvent:
        why = self._running[attempt]
        if attempt.cancelled():
            return LineEvent(moved=why or "the engine has given the line up")
        error = attempt.exception()
        if error is None:
            return event_of(attempt.result())
        _log.error("line %d of %s failed", request.line, request.batch_id, exc_info=error)
        failed = LineResult.unserved("engine_failed", f"the engine failed: {error!r}")
        return event_of(
            LineResult(HTTPStatus.INTERNAL_SERVER_ERROR, "", failed.body, is_retryable=True)
        )


class _Attempt(Response):
    """The answer that is an attempt. Starlette's would notice only when it next sends something
    that nobody listens any more."""

    def __init__(self, server: LineServer, request: LineRequest) -> None:
        super().__init__(media_type="application/x-ndjson")
        self._server = server
        self._request = request

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._server.serve(self._request, receive, send)


def _part(content: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": content, "more_body": True}


def _refusal(status: HTTPStatus, message: str) -> Response:
    error = {"message": message, "type": "server_error", "param": None, "code": status.value}
    return JSONResponse({"error": error}, status)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
