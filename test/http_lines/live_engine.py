"""Applications behind real sockets, on the loop of the test: any, and an engine's routes."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Self

import uvicorn
from fastapi import FastAPI
from msgspec.structs import replace
from starlette.types import ASGIApp

from batch.scripted_backend import ScriptedBackend
from sglang_coserve.config.coserve import Pool
from sglang_coserve.http_lines.engine_load import WantedLines
from sglang_coserve.http_lines.line_server import LineServer, add_line_routes, set_line_server
from sglang_coserve.http_lines.messages import EngineReport
from sglang_coserve.lines.backend import Backend
from sglang_coserve.web.asgi import FramingMiddleware, UnreadBodyMiddleware
from sglang_coserve.web.keys import set_admin_key
from waiting import until

ADMIN_KEY = "engine's admin"
READY_S = 30


class LiveApp:
    """An application that can be killed and started again on its port."""

    def __init__(self, app: ASGIApp, *, port: int = 0, lifespan: Any = "off") -> None:
        self._config = uvicorn.Config(app, log_level="error", lifespan=lifespan)  # type: ignore[arg-type]
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = uvicorn.Server(self._config)
        self._task = asyncio.ensure_future(self._server._serve(sockets=[self._socket]))
        async with asyncio.timeout(READY_S):
            while not self._server.started:
                assert not self._task.done(), "the server did not start"
                await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """End it as kill -9 does: connections break, the port is closed. Idempotent."""
        self._server.should_exit = self._server.force_exit = True
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        async with asyncio.timeout(READY_S):
            await self._task

    @property
    def num_connections(self) -> int:
        """Connections that clients have to it."""
        return len(self._server.server_state.connections)


class LiveEngine(LiveApp):
    """The routes of an engine on a backend."""

    def __init__(
        self, backend: Backend | None = None, *, port: int = 0, pool: Pool | None = None
    ) -> None:
        self.backend: Any = backend or ScriptedBackend(holds=True)
        self.pool = pool
        self.wants: WantedLines | None = None
        self.waiting = 0
        self.pulse_age_s = 0.0
        self.models: tuple[str, ...] = ("scripted", "adapter")
        self.lines = LineServer(self.backend, self._report)
        self.app = FastAPI()
        add_line_routes(self.app)
        set_admin_key(self.app, ADMIN_KEY)
        set_line_server(self.app, self.lines)
        for middleware in (UnreadBodyMiddleware, FramingMiddleware):
            self.app.add_middleware(middleware)
        super().__init__(self.app, port=port)

    async def _report(self, report: EngineReport) -> EngineReport:
        return replace(
            report,
            models=self.models,
            running=len(self.backend.in_flight) - self.waiting,
            waiting=self.waiting,
            pulse_age_s=self.pulse_age_s,
            pool=self.pool,
            wants=self.wants,
        )

    async def kill(self) -> None:
        """The same, once the engine has noticed what it lost."""
        await super().kill()
        await self.holds(0)

    async def holds(self, count: int) -> None:
        """Wait until the engine has ``count`` lines."""
        await until(lambda: len(self.backend.in_flight) == count)
