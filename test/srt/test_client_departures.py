"""A client that leaves ends what it has in the engine, over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from sglang_coserve.srt.tokenizer.client_presence import ClientDepartures


class Engine:
    """Serves a call for as long as its request runs, as SGLang's handlers do."""

    def __init__(self) -> None:
        self.departures = ClientDepartures(self.abort)
        self.running: set[str] = set()
        self.changed = asyncio.Event()
        self.refused: list[str] = []

    def abort(self, rid: str) -> None:
        self.running.discard(rid)
        self.changed.set()

    async def serve(self, request: Request) -> PlainTextResponse:
        rids = (await request.json())["rids"]
        async with self.departures.watched(request):
            for rid in rids:
                self.departures.sending(rid)
                self.running.add(rid)
            while self.running and "answer" not in rids:
                self.changed.clear()
                await self.changed.wait()
            try:
                self.departures.sending("late")
            except ValueError as error:
                self.refused.append(str(error))
        return PlainTextResponse("done")


async def on_server(client: Callable[[Engine, str], Awaitable[None]]) -> None:
    """Await ``client`` with an engine and the URL at which it is served."""
    engine = Engine()
    app = Starlette(routes=[Route("/", engine.serve, methods=["POST"])])
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(60):
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        await client(engine, f"http://127.0.0.1:{port}/")
    server.should_exit = True
    async with asyncio.timeout(60):
        await serving


def test_all_that_a_client_has_is_aborted_when_it_leaves() -> None:
    async def leave(engine: Engine, url: str) -> None:
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ReadTimeout):
                timeout = httpx.Timeout(30, read=0.5)
                await client.post(url, json={"rids": ["a", "b"]}, timeout=timeout)
        while engine.running or not engine.refused:
            await asyncio.sleep(0.01)
        assert "late" in engine.refused[0]

    asyncio.run(on_server(leave))


def test_a_client_that_waits_for_its_answer_gets_it() -> None:
    async def stay(engine: Engine, url: str) -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            assert (await client.post(url, json={"rids": ["answer"]})).text == "done"
        assert engine.running == {"answer"}
        assert not engine.refused

    asyncio.run(on_server(stay))
