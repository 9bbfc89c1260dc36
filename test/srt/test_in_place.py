"""That a server does not start when a part of co-serving is not in place."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from sglang_coserve.batch.api import add_batch_routes
from sglang_coserve.errors import StartupError
from sglang_coserve.lines.background import TaskSupervisor
from sglang_coserve.srt.monitoring.scheduler_query import replicas_info
from sglang_coserve.srt.routes.drain import Health
from sglang_coserve.srt.server_app import Lifespan, verify_app


def answer() -> None:
    """A route of somebody."""


def complete_app() -> FastAPI:
    app = FastAPI()
    add_batch_routes(app)
    return app


def replica(rate: float | None) -> dict[str, Any]:
    ours = {"config": {"offline_policy": "hygen"}, "expected_offline_tokens_per_s": rate}
    return {"memory_usage": {}, "coserve": ours}


def test_a_route_of_another_in_the_place_of_ours_stops_the_start() -> None:
    app = complete_app()
    verify_app(app)
    app.add_api_route("/v1/files", answer)
    app.router.routes.insert(0, app.router.routes.pop())
    with pytest.raises(StartupError, match="another route answers at /v1/files"):
        verify_app(app)


def test_every_replica_must_be_ours() -> None:
    with pytest.raises(StartupError, match="scheduler 1 is not CoserveScheduler"):
        replicas_info([replica(1.0), {"memory_usage": {}}])


async def test_nothing_is_started_before_the_check() -> None:
    started: list[str] = []

    @asynccontextmanager
    async def stock(app: FastAPI) -> AsyncIterator[None]:
        started.append("stock")
        yield

    async def states() -> list[dict[str, Any]]:
        return [{"memory_usage": {}}]

    app = complete_app()
    app.router.lifespan_context = stock
    state = SimpleNamespace(tokenizer_manager=SimpleNamespace(get_internal_state=states))
    server: Any = SimpleNamespace(app=app, _global_state=state)
    view: Any = None
    lifespan = Lifespan(server, view, Health(), TaskSupervisor())
    with pytest.raises(StartupError, match="scheduler 0"):
        async with app.router.lifespan_context(app):
            pass
    assert started == []
    assert isinstance(lifespan.failure, StartupError)
