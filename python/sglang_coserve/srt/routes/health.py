"""``/health``: whether the schedulers run, and whether the engine wants requests. Answers at once.

SGLang's own sends a request and looks after a second whether anything has come back, for up to 20
seconds: longer than a probe waits. Here the schedulers are asked once a second whether they are
there, in a message of a few bytes. ``/health_generate`` is SGLang's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI

from sglang_coserve.asgi import App, Receive, Scope, Send, send_error
from sglang_coserve.lines.task_supervisor import TaskSupervisor
from sglang_coserve.srt.monitoring.scheduler_query import PULSE, ask
from sglang_coserve.srt.routes.drain import drain_of

__all__ = ["HealthMiddleware", "Heartbeat", "install_health"]

_HEALTH: Final = "/health"
_HEALTH_PATHS: Final = frozenset({_HEALTH, "/health_generate", "/ready"})
_INTERVAL_S: Final = 1.0

_LONGEST_S: Final = 4.0
"""Schedulers that have said nothing for so long are stuck: longer than a step, and no more than
five seconds with the interval."""

_STATE: Final = "coserve_heartbeat"


class Heartbeat:
    """When all schedulers of a server answered last. Lives on the loop of its HTTP server."""

    def __init__(self, manager: Any, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """``manager`` is SGLang's tokenizer manager."""
        self._manager = manager
        self._monotonic_s = monotonic_s
        self._last_s: float | None = None

    async def run(self) -> None:
        """Ask them, for ever."""
        while True:
            await ask(self._manager, PULSE)
            self._last_s = self._monotonic_s()
            await asyncio.sleep(_INTERVAL_S)

    @property
    def has_started(self) -> bool:
        """False until SGLang has served its first request, and after it failed on its own check."""
        return self._last_s is not None and self._manager.server_status.name == "Up"

    def failure(self) -> str | None:
        """Return what is wrong; None if they run."""
        assert self._last_s is not None
        silent_s = self._monotonic_s() - self._last_s
        if silent_s <= _LONGEST_S:
            return None
        return f"the engine's schedulers have not answered for {silent_s:.0f} s"


def install_health(http_server: Any, background: TaskSupervisor) -> None:
    """Have ``/health`` of SGLang's app answered by ``HealthMiddleware``."""
    app: FastAPI = http_server.app
    app.add_middleware(HealthMiddleware)
    stock_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[Any]:
        heartbeat = Heartbeat(http_server._global_state.tokenizer_manager)
        setattr(app.state, _STATE, heartbeat)
        async with background.running("heartbeat", heartbeat.run), stock_lifespan(app) as state:
            yield state

    app.router.lifespan_context = lifespan


class HealthMiddleware:
    """Answers ``/health``: 503 from an engine that drains, whose schedulers are stuck, or that has
    ended; the last refuses all else, too. Before the engine's first request SGLang answers."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        drain = drain_of(scope.get("app"))
        heartbeat: Heartbeat | None = getattr(scope["app"].state, _STATE, None)
        if drain is not None and drain.has_stopped:
            await send_error(send, 503, "the engine has ended")
        elif drain is not None and drain.is_draining and scope["path"] in _HEALTH_PATHS:
            await send_error(send, 503, "the engine is draining")
        elif scope["path"] == _HEALTH and heartbeat is not None and heartbeat.has_started:
            if (failure := heartbeat.failure()) is not None:
                await send_error(send, 503, failure)
            else:
                await send({"type": "http.response.start", "status": 200, "headers": _NO_BODY})
                await send({"type": "http.response.body", "body": b""})
        else:
            await self._app(scope, receive, send)


_NO_BODY: Final = [(b"content-length", b"0")]
