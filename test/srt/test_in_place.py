"""That a server does not start when a part of co-serving is not in place."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from sglang_coserve.batch.routes import add_batch_routes
from sglang_coserve.errors import StartupError
from sglang_coserve.srt.launch import StartCheck, verify_app
from sglang_coserve.srt.monitoring.scheduler_query import replicas_info


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


def http_server(state: dict[str, Any], started: list[str]) -> Any:
    """SGLang's module, as far as a check asks it, with one scheduler that has this state."""
    app = complete_app()

    @asynccontextmanager
    async def stock(app: FastAPI) -> AsyncIterator[None]:
        started.append("stock")
        yield
        started.append("ended")

    async def states() -> list[dict[str, Any]]:
        return [state]

    app.router.lifespan_context = stock
    manager = SimpleNamespace(get_internal_state=states)
    return SimpleNamespace(
        app=app, _global_state=SimpleNamespace(tokenizer_manager=manager, scheduler_info={})
    )


async def lived(app: Any) -> None:
    async with app.router.lifespan_context(app):
        pass


async def test_nothing_is_started_before_the_check() -> None:
    started: list[str] = []
    server = http_server({"memory_usage": {}}, started)
    check = StartCheck(server)
    with pytest.raises(StartupError, match="scheduler 0"):
        await lived(server.app)
    assert started == []
    assert isinstance(check.failure, StartupError)


async def test_a_server_in_order_starts_and_tells_of_its_scheduler() -> None:
    started: list[str] = []
    server = http_server(replica(7.0), started)
    check = StartCheck(server)
    await lived(server.app)
    assert started == ["stock", "ended"]
    assert check.failure is None
    assert server._global_state.scheduler_info["coserve"]["offline_policy"] == "hygen"
