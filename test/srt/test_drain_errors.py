"""An engine that cannot be let in again says why, and one that has ended refuses everything."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from batch.scripted_backend import ScriptedBackend
from sglang_coserve.batch.errors import ConflictError
from sglang_coserve.errors import StartupError
from sglang_coserve.http_lines.line_server import LineServer
from sglang_coserve.srt.monitoring.scheduler_query import ANSWER_KEY
from sglang_coserve.srt.routes.drain import Drain, Health, HealthMiddleware, Heartbeat


def drain_of(opened: list[str], *, is_taken: bool = False) -> tuple[Drain, LineServer, Any]:
    """One whose service notes in ``opened`` that it is opened and closed."""
    manager = SimpleNamespace(gracefully_exit=False, coserve_has_stopped=False, rid_to_state={})
    lines = LineServer(ScriptedBackend())

    async def open_service(stack: AsyncExitStack) -> None:
        stack.callback(opened.append, "closed")
        if is_taken and opened:
            raise StartupError("another server has the directory")
        opened.append("opened")

    return Drain(manager, lines, open_service), lines, manager


async def test_a_directory_that_another_server_has_keeps_it_draining() -> None:
    opened: list[str] = []
    drain, lines, _ = drain_of(opened, is_taken=True)
    await drain.end()
    await drain.start()
    await drain.start()
    with pytest.raises(StartupError, match="another server"):
        await drain.end()
    assert opened == ["opened", "closed", "closed"]
    assert drain.is_draining
    assert lines.refuses == "draining"


async def test_an_engine_that_is_told_to_end_is_not_let_in_again() -> None:
    drain, lines, manager = drain_of([])
    await drain.end()
    assert lines.refuses is None
    await drain.start()
    manager.gracefully_exit = True
    with pytest.raises(ConflictError, match="start it again"):
        await drain.end()
    assert drain.is_draining


async def test_it_waits_for_requests_no_longer_than_it_is_told() -> None:
    drain, _, manager = drain_of([])
    manager.rid_to_state["one"] = object()
    await drain.start()
    began_s = time.monotonic()
    await drain.wait_until_empty(0.3)
    assert time.monotonic() - began_s >= 0.3
    assert drain.state().requests == 1
    asyncio.get_running_loop().call_later(0.2, manager.rid_to_state.clear)
    await asyncio.wait_for(drain.wait_until_empty(3600), 60)
    assert drain.state().requests == 0


async def test_an_engine_whose_offline_work_has_stopped_hands_lines_back_once() -> None:
    """The heartbeat of the schedulers brings the error."""
    drain, lines, _ = drain_of([])
    await drain.end()
    health, taken_out = Health(drain=drain), asyncio.Queue[str]()
    lines.take_out = taken_out.put_nowait  # type: ignore[method-assign]
    beats = iter([None, "ValueError: no plan", "ValueError: no plan"])

    async def answered(_: object) -> list[Any]:
        return [SimpleNamespace(internal_state={ANSWER_KEY: next(beats)})]

    manager = SimpleNamespace(
        auto_create_handle_loop=lambda: None, get_internal_state_communicator=answered
    )
    beating = asyncio.create_task(Heartbeat(manager, health.stop_offline).run())
    why = await asyncio.wait_for(taken_out.get(), 60)
    with pytest.raises(RuntimeError):  # The script of answers is over.
        await asyncio.wait_for(beating, 60)
    assert why.endswith("until its next start: ValueError: no plan")
    assert health.offline_stopped == why
    assert taken_out.empty()


@pytest.mark.parametrize("has_lines", [True, False])
def test_an_engine_that_has_ended_refuses_every_request(has_lines: bool) -> None:
    drain, _, manager = drain_of([])
    app = FastAPI()
    app.add_middleware(HealthMiddleware, health=Health(manager, drain if has_lines else None))

    async def models() -> dict[str, str]:
        return {}

    app.add_api_route("/v1/models", models)
    client = TestClient(app)
    manager.gracefully_exit = True
    assert client.get("/v1/models").status_code == 200
    assert client.get("/health").status_code == 503
    manager.coserve_has_stopped = True
    answer = client.get("/v1/models")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the engine has ended"
