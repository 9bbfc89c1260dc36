"""Whether the engine wants requests: ``/coserve/drain`` takes it out, ``/health`` says so at once.

A drain loses and repeats no work. Lines of a gateway go back to it, with all tokens that the engine
has generated. The engine's own batches stop where they are; whoever opens their directory next goes
on with them. Routers see at ``/health`` that the engine wants no requests; what it gets all the
same it serves. SIGTERM drains, too, and ends the process after the last request.

SGLang's own ``/health`` sends a request and looks after a second whether anything has come back,
for up to 20 seconds: longer than a probe waits. Here the schedulers are asked once a second whether
they are there, in a message of a few bytes. ``/health_generate`` is SGLang's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import FastAPI, Query
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_coserve.batch.errors import ConflictError
from sglang_coserve.errors import StartupError
from sglang_coserve.http_lines.line_server import LineServer
from sglang_coserve.srt.monitoring.scheduler_query import PULSE, ask
from sglang_coserve.web.asgi import route_path, send_error
from sglang_coserve.web.keys import operator_router
from sglang_coserve.web.routes import endpoints_of

DRAIN_PATH: Final = "/coserve/drain"
_DRAINING: Final = "draining"
OFFLINE_STOPPED: Final = "the engine serves no offline requests until its next start"
_POLL_S: Final = 0.1
_MOST_WAIT_S: Final = 3600.0


class DrainState(BaseModel):
    """How far an engine is."""

    is_draining: bool

    lines: int
    """Of gateways, that are still to be handed back."""

    requests: int
    """Of all kinds, that are not answered yet: what the process waits for before it ends."""


class Drain:
    """Whether an engine takes lines. Lives on the event loop of its HTTP server."""

    def __init__(
        self,
        tokenizer_manager: Any,
        lines: LineServer,
        open_service: Callable[[AsyncExitStack], Awaitable[None]],
    ) -> None:
        """``open_service`` opens the engine's own Batch API, if it has one, for as long as the
        stack."""
        self._manager = tokenizer_manager
        self._lines = lines
        self._open_service = open_service
        self._service: AsyncExitStack | None = None
        self._changing = asyncio.Lock()

    @property
    def is_draining(self) -> bool:
        """True while the engine takes no lines."""
        return self._service is None

    def state(self) -> DrainState:
        """Return what is left."""
        return DrainState(
            is_draining=self.is_draining,
            lines=self._lines.num_in_flight,
            requests=len(self._manager.rid_to_state),
        )

    async def start(self) -> None:
        """Hand all lines back and take no more. Idempotent; does not wait for their last tokens."""
        async with self._changing:
            self._lines.close(_DRAINING)
            service, self._service = self._service, None
            if service is not None:
                await service.aclose()

    def stop_lines(self, why: str) -> None:
        """Hand the lines of gateways back: the engine serves no more until its next start."""
        self._lines.take_out(why)

    async def end(self) -> None:
        """Take lines, and go on with the batches. Idempotent.

        Raises:
            ConflictError: the process is about to end.
            StartupError: the data directory cannot be used: another server has it, say.
        """
        async with self._changing:
            if self._manager.gracefully_exit:
                message = "the engine has been told to end: start it again"
                raise ConflictError(message, code="engine_ends")
            if self._service is not None:
                return
            async with AsyncExitStack() as stack:
                await self._open_service(stack)
                self._service = stack.pop_all()
            self._lines.open()

    async def wait_until_empty(self, timeout_s: float) -> None:
        """Wait until every request is answered, or for ``timeout_s``."""
        give_up_s = time.monotonic() + timeout_s
        while self._manager.rid_to_state and time.monotonic() < give_up_s:
            await asyncio.sleep(_POLL_S)


def add_drain_routes(app: FastAPI, health: Health) -> list[Any]:
    """Add the routes; return their functions, which need the admin key."""
    router = operator_router(DRAIN_PATH)

    def drain_of_app() -> Drain:
        assert health.drain is not None, "whoever has the admin key can drain"
        return health.drain

    @router.post("")
    async def drain_engine(
        wait_s: Annotated[float, Query(ge=0, le=_MOST_WAIT_S)] = 0.0,
    ) -> DrainState:
        """Take the engine out; answer when all requests are answered, or after ``wait_s``."""
        drain = drain_of_app()
        await drain.start()
        await drain.wait_until_empty(wait_s)
        return drain.state()

    @router.get("")
    async def show_drain() -> DrainState:
        """Say whether the engine is draining, and what is left."""
        return drain_of_app().state()

    @router.delete("")
    async def end_drain() -> DrainState:
        """Let the engine in again."""
        drain = drain_of_app()
        try:
            await drain.end()
        except StartupError as error:
            raise ConflictError(str(error), code="directory_not_usable") from error
        return drain.state()

    app.router.routes.extend(router.routes)
    return endpoints_of(router)


_HEALTH: Final = "/health"
_HEALTH_PATHS: Final = frozenset({_HEALTH, "/health_generate", "/ready"})
_INTERVAL_S: Final = 1.0

_LONGEST_S: Final = 4.0
"""Schedulers that have said nothing for so long are stuck: longer than a step, and no more than
five seconds with the interval."""


class Heartbeat:
    """When all schedulers of a server answered last, and whether they serve offline requests.

    Lives on the loop of the HTTP server.
    """

    def __init__(self, manager: Any, stopped: Callable[[str], None]) -> None:
        """``manager`` is SGLang's tokenizer manager. ``stopped`` is called once, with the reason,
        when a scheduler has stopped offline work."""
        self._manager = manager
        self._stopped = stopped
        self._last_s: float | None = None
        self._has_stopped = False

    async def run(self) -> None:
        """Ask them, for ever."""
        while True:
            errors = [error for error in await ask(self._manager, PULSE) if error is not None]
            self._last_s = time.monotonic()
            if errors and not self._has_stopped:
                self._has_stopped = True
                self._stopped(f"{OFFLINE_STOPPED}: {errors[0]}")
            await asyncio.sleep(_INTERVAL_S)

    @property
    def has_started(self) -> bool:
        """False until SGLang has served its first request, and after it failed on its own check."""
        return self._last_s is not None and self._manager.server_status.name == "Up"

    @property
    def age_s(self) -> float:
        """Seconds since all schedulers answered last; 0 before the first answer."""
        return 0.0 if self._last_s is None else time.monotonic() - self._last_s

    def failure(self) -> str | None:
        """Return what is wrong; None if they run."""
        silent_s = self.age_s
        if silent_s <= _LONGEST_S:
            return None
        return f"the engine's schedulers have not answered for {silent_s:.0f} s"


@dataclass(slots=True)
class Health:
    """What a server is judged by; each None until it is there."""

    manager: Any = None
    """SGLang's tokenizer manager."""

    drain: Drain | None = None
    """None on a server whose lines nobody can send."""

    heartbeat: Heartbeat | None = None

    offline_stopped: str | None = None
    """Why offline requests wait until the next start; None while they are served."""

    def stop_offline(self, why: str) -> None:
        """Note why offline requests wait until the next start, and hand lines of gateways back."""
        self.offline_stopped = why
        if self.drain is not None:
            self.drain.stop_lines(why)

    @property
    def is_draining(self) -> bool:
        """Whether the engine is to get no requests: it was taken out, or told to end."""
        is_ending = self.manager is not None and bool(self.manager.gracefully_exit)
        return is_ending or (self.drain is not None and self.drain.is_draining)

    @property
    def has_ended(self) -> bool:
        """Whether the engine's processes have ended, as they were told."""
        return self.manager is not None and bool(self.manager.coserve_has_stopped)


class HealthMiddleware:
    """Answers ``/health``: 503 from an engine that drains, whose schedulers are stuck, or that has
    ended; the last refuses all else, too. Before the engine's first request SGLang answers."""

    def __init__(self, app: ASGIApp, health: Health) -> None:
        self._app = app
        self._health = health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        heartbeat = self._health.heartbeat
        if self._health.has_ended:
            await send_error(send, 503, "the engine has ended")
        elif self._health.is_draining and route_path(scope) in _HEALTH_PATHS:
            await send_error(send, 503, "the engine is draining")
        elif route_path(scope) == _HEALTH and heartbeat is not None and heartbeat.has_started:
            if (failure := heartbeat.failure()) is not None:
                await send_error(send, 503, failure)
            else:
                await send({"type": "http.response.start", "status": 200, "headers": _NO_BODY})
                await send({"type": "http.response.body", "body": b""})
        else:
            await self._app(scope, receive, send)


_NO_BODY: Final = [(b"content-length", b"0")]
