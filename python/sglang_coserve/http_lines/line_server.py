"""``/coserve/lines``: what an engine serves of lines that other processes keep."""

from __future__ import annotations

import secrets
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from sglang_coserve.batch.errors import BatchApiNotReadyError
from sglang_coserve.batch.routes.caller import endpoints_of, operator_router
from sglang_coserve.batch.routes.errors import OpenAIRoute
from sglang_coserve.http_lines.line_stream import LineStream
from sglang_coserve.http_lines.messages import (
    LINES_PATH,
    EngineDelays,
    EngineDescription,
    LineCall,
    encode_message,
)
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.lines.backend import Backend, LineRequest, MovedKv

_FRAME_BYTES: Final = 1 << 20
"""What a call has beside the body and the tokens, more than is needed."""

_ENGINE_CHANGES: Final = "the engine's model is being exchanged"


class LineServer:
    """Serves attempts at lines with ``backend``. Lives on its event loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._run = secrets.token_hex(8)
        self._closed: str | None = None
        self._streams: set[LineStream] = set()
        backend.when_changing(lambda: self.take_out(_ENGINE_CHANGES))

    @property
    def refuses(self) -> str | None:
        """Why no lines are taken now; None when they are."""
        if self._closed is None and self._backend.is_changing:
            return _ENGINE_CHANGES
        return self._closed or self._backend.stalled_by

    @property
    def num_in_flight(self) -> int:
        """Attempts that are being made."""
        return sum(stream.num_in_flight for stream in self._streams)

    @property
    def call_limits(self) -> BodyLimits:
        """What one call may be: a line, and the tokens that it goes on after."""
        limits = self._backend.limits
        kv = MovedKv.__dataclass_fields__
        names = (*LineCall.__struct_fields__, *LineRequest.__struct_fields__, *kv)
        return BodyLimits(
            2 * limits.max_bytes + _FRAME_BYTES,
            2 * limits.max_values,
            limits.max_objects + 3,
            limits.max_keys + len(names),
        )

    def description(self) -> EngineDescription:
        """Say what the engine serves."""
        backend = self._backend
        return EngineDescription(
            backend.model,
            tuple(sorted(backend.endpoints)),
            backend.limits,
            backend.load().offline_tokens_per_s,
            self.refuses,
        )

    async def delays(self) -> EngineDelays:
        """Say by how much batches have delayed online requests; whoever computes is asked."""
        delays_s = await self._backend.online_delays_s()
        return EngineDelays(self._run, None if delays_s is None else dict(delays_s))

    def close(self, why: str) -> None:
        """Give all lines back, each after what the engine has generated of it; take no more, and
        end the streams."""
        self._closed = why
        for stream in self._streams:
            stream.close(why)

    def take_out(self, why: str) -> None:
        """Give all lines back, each after what the engine has generated of it."""
        for stream in self._streams:
            stream.take_out(why)

    def open(self) -> None:
        """Take lines again after ``close``."""
        self._closed = None

    async def serve(self, receive: Receive, send: Send) -> None:
        """Serve what one connection asks for, until that ends."""
        stream = LineStream(self._backend, self._refusal, self.call_limits)
        self._streams.add(stream)
        if self._closed is not None:
            stream.close(self._closed)
        try:
            await stream.serve(receive, send)
        finally:
            self._streams.remove(stream)

    def _refusal(self, attempt: LineRequest) -> str | None:
        """Return why an attempt is not made here now."""
        model = self._backend.model
        if self.refuses is None and attempt.model != model:
            return f"the engine has the model {model}, and the line is of {attempt.model}"
        return self.refuses


class _StreamResponse(Response):
    """Both directions of a connection at the same time, which no response of Starlette's is."""

    def __init__(self, server: LineServer) -> None:
        super().__init__()
        self._server = server

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        await self._server.serve(receive, send)


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
async def describe_engine(request: Request) -> Response:
    """Say what the engine serves, and whether it takes lines now."""
    description = _server(request).description()
    return Response(encode_message(description), media_type="application/json")


@router.get("/delays")
async def show_delays(request: Request) -> Response:
    """Say by how many seconds each batch has delayed online requests since the start."""
    return Response(encode_message(await _server(request).delays()), media_type="application/json")


@router.post("")
async def serve_lines(request: Request) -> Response:
    """Make attempts at lines: JSON lines in, and JSON lines out at the same time."""
    return _StreamResponse(_server(request))


def _server(request: Request) -> LineServer:
    server: LineServer | None = getattr(request.app.state, _STATE, None)
    if server is None:
        raise BatchApiNotReadyError(_STARTING)
    return server
