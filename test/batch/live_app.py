"""The routes behind a real socket, with a service on a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import openai
from fastapi import FastAPI

from app_thread import TIMEOUT_S, app_thread
from batch.scripted_backend import ScriptedBackend
from calls import client_of
from sglang_coserve.batch.api import add_batch_routes
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.routes.service import set_service
from sglang_coserve.batch.service import BatchService
from sglang_coserve.web.keys import set_admin_key


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
        self._running = app_thread(self.app, port)

    def __enter__(self) -> Self:
        self.port = self._running.__enter__()
        self.base_url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *error: object) -> None:
        self._running.__exit__(*error)  # type: ignore[arg-type]

    def client(self, api_key: str = "key") -> openai.OpenAI:
        return client_of(self, api_key)

    def in_loop(self, do: Callable[[], Any]) -> None:
        """Call ``do`` on the server's event loop, where the engine is."""
        asyncio.run_coroutine_threadsafe(_call(do), self._loop).result(TIMEOUT_S)


async def _call(do: Callable[[], Any]) -> None:
    do()
