"""The routes behind a real socket, with a service on a scripted engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import openai
import uvicorn
from fastapi import FastAPI

from batch.scripted_backend import ScriptedBackend
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.routes import add_batch_routes
from sglang_coserve.batch.routes.caller import set_admin_key, set_service
from sglang_coserve.batch.service import BatchService

READY_TIMEOUT_S = 30


class LiveApp:
    """A server on a free loopback port, in a thread of its own."""

    def __init__(
        self,
        directory: Path | None,
        backend: ScriptedBackend | None = None,
        *,
        port: int = 0,
        admin_key: str | None = None,
        **limits: Any,
    ) -> None:
        self.backend = backend or ScriptedBackend()
        self.data = directory
        self.service: BatchService | None = None
        self._ready = threading.Event()

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
            self._loop = asyncio.get_running_loop()
            if directory is None:
                yield
                return
            async with await BatchService.open(
                directory, self.backend, BatchLimits(**limits)
            ) as service:
                self.service = service
                set_service(app, service)
                yield

        self.app = FastAPI(lifespan=lifespan)
        add_batch_routes(self.app)
        if admin_key is not None:
            set_admin_key(self.app, admin_key)
        config = uvicorn.Config(self.app, port=port, log_level="error")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        waiting = threading.Event()
        for _ in range(READY_TIMEOUT_S * 100):
            if self._server.started or not self._thread.is_alive():
                break
            waiting.wait(0.01)
        assert self._server.started, "the server did not start"
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.should_exit = True
        self._thread.join(READY_TIMEOUT_S)
        assert not self._thread.is_alive(), "the server did not stop"

    def client(self, api_key: str = "key") -> openai.OpenAI:
        """OpenAI's client, which tells of every failure at once."""
        url = f"{self.base_url}/v1"
        return openai.OpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=30)

    def in_loop(self, do: Callable[[], Any]) -> None:
        """Call ``do`` on the server's event loop, where the engine is."""
        asyncio.run_coroutine_threadsafe(_call(do), self._loop).result(READY_TIMEOUT_S)


async def _call(do: Callable[[], Any]) -> None:
    do()
