"""The routes of an engine behind a real socket, on the loop of the test."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Self

import uvicorn
from fastapi import FastAPI

from batch.scripted_backend import ScriptedBackend
from sglang_coserve.batch.routes.caller import set_admin_key
from sglang_coserve.core.engine_load import (
    ClassLoad,
    EngineLoad,
    KvFormat,
    Pool,
    Versions,
    WantedLines,
)
from sglang_coserve.http_lines.line_server import LineServer, add_line_routes, set_line_server
from sglang_coserve.http_lines.messages import LOAD_PATH
from sglang_coserve.lines.backend import Backend

ADMIN_KEY = "engine's admin"
READY_S = 30


def engine_load(
    model: str,
    *,
    running: int = 0,
    waiting: int = 0,
    is_draining: bool = False,
    pool: Pool | None = None,
    wants: WantedLines | None = None,
) -> EngineLoad:
    """What an engine without online work says of itself."""
    nothing = ClassLoad(running=0, waiting=0, outstanding_tokens=0)
    return EngineLoad(
        online=nothing,
        offline=ClassLoad(running=running, waiting=waiting, outstanding_tokens=0),
        kv_tokens=1 << 16,
        online_kv_tokens=0,
        reclaimable_kv_tokens=0,
        reclaim_s=0.0,
        headroom_tokens_per_s=1000.0,
        max_lines=64,
        pool=pool,
        wants=wants,
        replicas=1,
        age_s=0.0,
        is_draining=is_draining,
        model_name="scripted",
        models=("scripted", "adapter"),
        model=model,
        kv_fingerprint="kv",
        kv_format=KvFormat(
            dtype="float32",
            kv_cache_dtype="auto",
            quantization=None,
            tp_size=1,
            pp_size=1,
            page_size=1,
        ),
        versions=Versions(sglang_coserve="0", sglang="0"),
    )


class LiveEngine:
    """An engine that can be killed and started again on its port."""

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        port: int = 0,
        pool: Pool | None = None,
    ) -> None:
        self.backend: Any = backend or ScriptedBackend(holds=True)
        self.pool = pool
        self.wants: WantedLines | None = None
        self.waiting = 0
        self.lines = LineServer(self.backend)
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.app = FastAPI()
        add_line_routes(self.app)
        set_admin_key(self.app, ADMIN_KEY)
        set_line_server(self.app, self.lines)
        self.app.add_api_route(LOAD_PATH, self._load)

    async def _load(self) -> EngineLoad:
        return engine_load(
            self.backend.model,
            running=len(self.backend.in_flight),
            waiting=self.waiting,
            is_draining=self.lines.refuses is not None,
            pool=self.pool,
            wants=self.wants,
        )

    async def __aenter__(self) -> Self:
        config = uvicorn.Config(self.app, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
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
            while self.lines.num_in_flight:
                await asyncio.sleep(0.002)

    @property
    def num_connections(self) -> int:
        """Connections that clients have to it."""
        return len(self._server.server_state.connections)

    async def holds(self, count: int) -> None:
        """Wait until the engine has ``count`` lines."""
        async with asyncio.timeout(READY_S):
            while len(self.backend.in_flight) != count:
                await asyncio.sleep(0.002)
