"""A client that leaves ends what it has in the engine, over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from sglang.srt.sampling.sampling_params import SamplingParams
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from sglang_coserve.srt.tokenizer.client_presence import (
    ClientDepartures,
    InterruptedRequests,
    identity_of,
    key_of,
)


def tokenized(prompt: list[int], **params: Any) -> Any:
    """Of SGLang's message to the scheduler, what tells requests from each other."""
    return SimpleNamespace(input_ids=prompt, sampling_params=SamplingParams(**params))


class Engine:
    """Serves a call for as long as its request runs, as SGLang's handlers do."""

    def __init__(self) -> None:
        self.departures = ClientDepartures(self.abort, self.outputs_of)
        self.running: set[str] = set()
        self.outputs: dict[str, list[int]] = {}
        self.began_with: list[list[int]] = []
        self.changed = asyncio.Event()
        self.refused: list[str] = []

    def abort(self, rid: str) -> None:
        self.running.discard(rid)
        self.changed.set()

    def outputs_of(self, rid: str) -> list[int] | None:
        return self.outputs.setdefault(rid, []) if rid in self.running else None

    async def serve(self, request: Request) -> PlainTextResponse:
        rids = (await request.json())["rids"]
        async with self.departures.watched(request, key_of(request.headers)):
            before = self.departures.generated_before(tokenized([1, 2]), "weights")
            self.began_with.append(list(before))
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


async def leave_early(url: str, rid: str, headers: dict[str, str]) -> None:
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ReadTimeout):
            timeout = httpx.Timeout(30, read=0.5)
            await client.post(url, json={"rids": [rid]}, headers=headers, timeout=timeout)


def test_a_request_that_is_sent_again_goes_on_after_its_tokens() -> None:
    """Though it is cut off once more, before the first of them came back."""
    key = {"x-request-id": "r-1", "authorization": "Bearer a"}

    async def evict(engine: Engine, url: str) -> None:
        for rid, tokens in (("a", [7, 8, 9]), ("b", []), ("c", [7, 8, 5, 6])):
            engine.outputs[rid] = tokens
            await leave_early(url, rid, key)
            while engine.running:
                await asyncio.sleep(0.01)
            tokens.extend([4] if tokens else [])  # From the step under way.
        for headers in ({**key, "authorization": "Bearer b"}, {"x-request-id": "r-2"}, {}, key):
            async with httpx.AsyncClient(timeout=30) as client:
                await client.post(url, json={"rids": ["answer"]}, headers=headers)
        # The last of all tokens was not looked at.
        assert engine.began_with == [[], [7, 8, 9], [7, 8, 9], [], [], [], [7, 8, 5, 6]]

    asyncio.run(on_server(evict))


def test_only_the_same_request_goes_on() -> None:
    key = key_of({"idempotency-key": "k", "x-request-id": "r"})
    assert (
        key == key_of({"idempotency-key": "k"}) != key_of({"x-request-id": "k", "x-api-key": "a"})
    )
    assert key is not None
    assert key_of({"idempotency-key": ""}) is None
    same = tokenized([1, 2], custom_params={"coserve_class": "offline"})
    others = [tokenized([1, 2, 3]), tokenized([1, 2], temperature=0.5), tokenized([1])]
    identities = {identity_of(key, each, "") for each in (tokenized([1, 2]), same, *others)}
    assert len(identities) == 4
    assert identity_of(key, same, "other weights") not in identities


def test_what_is_kept_is_bounded_in_time_and_size() -> None:
    now_s = 0.0
    kept = InterruptedRequests(lambda: now_s)
    kept.keep(b"a", [1, 2, 3], [])
    now_s = 4000.0
    assert kept.take(b"a") == []
    for number in range(5000):
        kept.keep(number.to_bytes(2), [1, 2], [])
    assert kept.take((0).to_bytes(2)) == []
    assert kept.take((4999).to_bytes(2)) == [1]
    kept.keep(b"large", [1] * 1_000_000, [])
    kept.keep(b"larger", [1] * 1_000_000, [])
    assert kept.take(b"large") == []
    assert len(kept.take(b"larger")) == 999_999
    assert kept.take(b"larger") == [], "once"
