"""Attempts at lines over a real socket: tokens, ends, closed connections, dead engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from zlib import crc32

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.responses import RedirectResponse, Response
from msgspec.structs import replace

from batch.scripted_backend import ENDPOINT, ScriptedBackend, answer, tokens_of
from http_lines.heard import Heard
from http_lines.live_engine import ADMIN_KEY, READY_S, LiveApp, LiveEngine
from sglang_coserve.http_lines.http_engine import HttpEngine
from sglang_coserve.http_lines.messages import (
    EngineLostError,
    EngineRefusesError,
    LineEvent,
    decode_message,
    encode_message,
)
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.lines.backend import LineMovedError, LineRequest, LineResult, MovedKv


def request(name: str = "a", **body: Any) -> LineRequest:
    """Each name is a line of its own."""
    return LineRequest("batch_1", crc32(name.encode()), ENDPOINT, {"prompt": name, **body})


@asynccontextmanager
async def connected(
    backend: ScriptedBackend | None = None,
) -> AsyncGenerator[tuple[LiveEngine, HttpEngine]]:
    """An engine, and a connection to it."""
    async with (
        LiveEngine(backend) as engine,
        HttpEngine(engine.url, ADMIN_KEY) as connection,
    ):
        yield engine, connection


async def held(engine: LiveEngine, connection: HttpEngine) -> asyncio.Future[LineResult]:
    """An attempt at a line, which the engine has."""
    attempt = asyncio.ensure_future(connection.run(request(), "scripted", Heard()))
    await engine.holds(1)
    return attempt


@asynccontextmanager
async def posting(
    engine: LiveEngine,
) -> AsyncGenerator[Callable[[bytes], Awaitable[httpx2.Response]]]:
    """Send content to an engine's route."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with (
        engine,
        httpx2.AsyncClient(base_url=engine.url, headers=headers, trust_env=False) as client,
    ):
        yield lambda content: client.post("/coserve/lines", content=content)


@asynccontextmanager
async def answering(
    content: bytes, status: int = 200, media_type: str = "application/x-ndjson"
) -> AsyncGenerator[HttpEngine]:
    """A connection to what answers each attempt so."""

    async def answer_attempt() -> Response:
        return Response(content, status, media_type=media_type)

    app = FastAPI()
    app.add_api_route("/coserve/lines", answer_attempt, methods=["POST"])
    async with LiveApp(app) as server, HttpEngine(server.url, ADMIN_KEY) as connection:
        yield connection


async def test_an_answer_of_any_length_comes_over() -> None:
    long = {"text": "x" * 3_000_000, "usage": {}}

    backend = ScriptedBackend(answers=lambda _: LineResult(200, "id", long))
    async with connected(backend) as (_, connection):
        assert (await connection.run(request(), "scripted", Heard())).body == long


def beat_every(monkeypatch: pytest.MonkeyPatch, heartbeat_s: float, silent_s: float) -> None:
    """Have engines say so often that they are there, and be lost when silent for so long."""
    monkeypatch.setattr("sglang_coserve.http_lines.line_server.HEARTBEAT_S", heartbeat_s)
    monkeypatch.setattr("sglang_coserve.http_lines.http_engine._SILENT_S", silent_s)


async def test_a_line_that_waits_longer_than_the_heartbeat_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beat_every(monkeypatch, 0.1, 2.0)
    async with connected() as (engine, connection):
        attempt = await held(engine, connection)
        await asyncio.sleep(3.0)  # Some heartbeats.
        engine.backend.held("a").finish()
        assert (await attempt).is_ok


async def test_a_closed_engine_says_why_it_takes_no_line() -> None:
    async with connected() as (engine, connection):
        engine.lines.close("draining")
        with pytest.raises(LineMovedError, match="draining"):
            await connection.run(request(), "scripted", Heard())


async def test_a_silent_engine_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_coserve.http_lines.http_engine._SILENT_S", 0.2)
    async with connected() as (engine, connection):
        with pytest.raises(EngineLostError, match="nothing"):
            await connection.run(request(), "scripted", Heard())
        await engine.holds(0)  # It notices that nobody listens.


async def test_many_lines_at_a_time_end_one_by_one() -> None:
    async with connected() as (engine, connection):
        names = [f"{n}" for n in range(50)]
        attempts = {
            name: asyncio.ensure_future(connection.run(request(name), "scripted", Heard()))
            for name in names
        }
        await engine.holds(len(names))
        attempts.pop("7").cancel()
        await engine.holds(len(names) - 1)
        for name in attempts:
            engine.backend.held(name).generate(2)
            engine.backend.held(name).finish()
        async with asyncio.timeout(READY_S):
            for name, attempt in attempts.items():
                assert await attempt == answer(request(name))


async def test_tokens_that_cannot_be_taken_end_their_line_alone() -> None:
    def refuse(_tokens: Sequence[int]) -> None:
        raise OverflowError("no room")

    async with connected() as (engine, connection):
        bad = asyncio.ensure_future(connection.run(request("bad"), "scripted", Heard(refuse)))
        good = asyncio.ensure_future(connection.run(request("good"), "scripted", Heard()))
        await engine.holds(2)
        engine.backend.held("bad").generate(1)
        with pytest.raises(OverflowError):
            await bad
        await engine.holds(1)
        engine.backend.held("good").finish()
        assert (await good).is_ok


async def test_a_failing_backend_and_what_json_cannot_say_fail_their_lines_alone() -> None:
    def answers(line: LineRequest) -> LineResult:
        if line.body["prompt"] == "fails":
            raise RuntimeError("out of luck")
        return LineResult(200, "id", {"text": object()}) if "bad" in line.body else answer(line)

    async with connected(ScriptedBackend(answers=answers)) as (_, connection):
        fails, bad, good = await asyncio.gather(
            connection.run(request("fails"), "scripted", Heard()),
            connection.run(request(bad=True), "scripted", Heard()),
            connection.run(request(), "scripted", Heard()),
        )
        assert "out of luck" in fails.body["error"]["message"]
        for each in (fails, bad):
            assert (each.status_code, each.is_retryable) == (500, True)
        assert good.is_ok
        with pytest.raises(TypeError):
            await connection.run(request(bad=object()), "scripted", Heard())
        assert (await connection.run(request(), "scripted", Heard())).is_ok


async def test_a_line_that_is_too_large_ends_no_other() -> None:
    backend = ScriptedBackend(holds=True, limits=BodyLimits(max_bytes=1 << 10))
    async with connected(backend) as (engine, connection):
        small = await held(engine, connection)
        large = await connection.run(request(text="x" * 3_000_000), "scripted", Heard())
        assert (large.status_code, large.is_retryable) == (413, False)
        engine.backend.held("a").finish()
        assert (await small).is_ok


async def test_an_engine_that_dies_or_is_gone_is_lost() -> None:
    async with connected() as (engine, connection):
        attempt = await held(engine, connection)
        await engine.kill()
        with pytest.raises(EngineLostError):
            await attempt
        with pytest.raises(EngineLostError):
            await connection.run(request(), "scripted", Heard())


async def test_each_start_of_an_engine_has_a_name_of_its_own() -> None:
    async with connected() as (engine, connection):
        first = (await connection.report()).run
        assert (await connection.report()).run == first
        await engine.kill()
        async with LiveEngine(port=engine.port):
            assert (await connection.report()).run != first


async def test_lines_go_elsewhere_while_the_model_is_exchanged_and_of_another_model_always() -> (
    None
):
    async with connected() as (engine, connection):
        attempt = await held(engine, connection)
        engine.backend.is_changing = True
        engine.backend.take_out()
        with pytest.raises(LineMovedError, match="exchanged"):
            await attempt
        with pytest.raises(LineMovedError, match="exchanged"):
            await connection.run(request(), "scripted", Heard())
        engine.backend.is_changing, engine.backend.model = False, "another"
        with pytest.raises(LineMovedError, match=r"another.*scripted"):
            await connection.run(request(), "scripted", Heard())


async def test_lines_go_elsewhere_once_the_engine_serves_none_until_its_next_start() -> None:
    async with connected() as (engine, connection):
        attempt = await held(engine, connection)
        engine.backend.stalled_by = "no plans"
        engine.lines.take_out("no plans")
        with pytest.raises(LineMovedError, match="no plans"):
            await attempt
        with pytest.raises(LineMovedError, match="no plans"):
            await connection.run(request(), "scripted", Heard())
        assert (await connection.report()).refuses == "no plans"


async def test_only_the_admin_key_opens_the_routes() -> None:
    async with LiveEngine() as engine:
        async with HttpEngine(engine.url, "guess") as connection:
            with pytest.raises(EngineRefusesError, match="--engine-admin-key"):
                await connection.report()
            with pytest.raises(EngineRefusesError, match="--engine-admin-key"):
                await connection.run(request(), "scripted", Heard())
        assert engine.backend.started == []


async def test_what_is_no_attempt_is_refused_with_what_is_wrong() -> None:
    limits = BodyLimits(max_bytes=1 << 10)
    engine = LiveEngine(ScriptedBackend(limits=limits))
    async with posting(engine) as post, HttpEngine(engine.url, ADMIN_KEY) as connection:
        bad = await post(b'{"line": "one"}')
        assert bad.status_code == 400
        assert "LineRequest" in bad.json()["error"]["message"]
        report = await connection.report()
        assert report.limits == limits
        assert (report.model, report.endpoints) == (
            "scripted",
            ("/v1/chat/completions", ENDPOINT, "/v1/responses"),
        )
        assert engine.backend.started == []


async def test_an_answer_is_one_event_on_a_line_and_then_ends() -> None:
    attempt = request().to_wire("scripted", 0.0)
    async with posting(LiveEngine(ScriptedBackend())) as post:
        answered = await post(encode_message(attempt).rstrip())
        assert answered.headers["content-type"] == "application/x-ndjson"
        (event,) = [decode_message(line, LineEvent) for line in answered.content.splitlines()]
        assert event == LineEvent(result=answer(request()))


async def test_another_program_is_told_apart_and_the_key_is_sent_nowhere_else() -> None:
    async with LiveEngine() as engine, LiveEngine() as other:

        async def elsewhere() -> RedirectResponse:
            return RedirectResponse(f"{other.url}/coserve/load")

        engine.app.add_api_route("/moved", elsewhere)
        async with HttpEngine(engine.url, ADMIN_KEY) as connection:
            with pytest.raises(EngineRefusesError, match="307"):
                await connection.ask("/moved")
            with pytest.raises(EngineRefusesError, match="404"):
                await connection.ask("/nothing")


async def test_a_line_that_is_asked_back_comes_with_its_tokens_and_what_was_left_of_it() -> None:
    async with connected() as (engine, connection):
        moves, stays = (replace(request(name), attempt=name) for name in ("moves", "stays"))
        heard = Heard()
        assert await connection.hand_back("moves")  # Nobody has it yet.
        moving = asyncio.ensure_future(connection.run(moves, "scripted", heard))
        staying = asyncio.ensure_future(connection.run(stays, "scripted", Heard()))
        await engine.holds(2)
        engine.backend.leaves = MovedKv("0" * 32, 48)
        for _ in range(2):
            engine.backend.held("moves").generate(2)
            await asyncio.sleep(0.05)
        for _ in range(2):
            assert await connection.hand_back("moves")
        with pytest.raises(LineMovedError, match="asked for") as error:
            await moving
        assert error.value.kv == engine.backend.leaves
        assert heard.tokens == tokens_of("moves", 5)
        assert heard.prompts == [len("moves")]
        assert heard.runs == [(await connection.report()).run]
        engine.backend.leaves = None
        # It cannot leave: it is aborted, and goes on elsewhere.
        assert await connection.hand_back("stays")
        with pytest.raises(LineMovedError) as error:
            await staying
        assert error.value.kv is None
        await engine.kill()
        assert not await connection.hand_back("stays")


async def test_an_event_that_only_newer_gateways_understand_is_passed_over() -> None:
    async with answering(b'{"news": 1}\n' + encode_message(LineEvent((1, 2)))) as connection:
        heard = Heard()
        with pytest.raises(EngineLostError, match="before its result"):
            await connection.run(request(), "scripted", heard)
        assert heard.tokens == [1, 2]


async def test_a_message_without_an_end_is_not_gathered_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang_coserve.http_lines.http_engine._MOST_MESSAGE_BYTES", 1 << 16)
    async with answering(b"x" * (1 << 18)) as connection:
        with pytest.raises(EngineRefusesError, match="message of more than"):
            await connection.run(request(), "scripted", Heard())


@pytest.mark.parametrize("status", [400, 413])
async def test_what_a_proxy_refuses_is_an_attempt_and_what_the_engine_refuses_is_final(
    status: int,
) -> None:
    async with answering(b"<html>too large</html>", status, "text/html") as connection:
        result = await connection.run(request(), "scripted", Heard())
        assert (result.status_code, result.is_retryable) == (0, True)
        assert f"HTTP {status}" in result.body["error"]["message"]
    async with answering(b'{"error": {}}', status, "application/json") as connection:
        result = await connection.run(request(), "scripted", Heard())
        assert (result.status_code, result.is_retryable) == (status, False)


async def test_an_attempt_whose_client_has_hung_up_ends() -> None:
    async with connected() as (engine, connection):
        attempt = await held(engine, connection)
        attempt.cancel()
        await engine.holds(0)
        assert engine.lines.num_in_flight == 0


async def test_an_answer_that_is_none_of_ours_is_told_apart() -> None:
    async with answering(b'{"tokens": "none"}\n') as connection:
        with pytest.raises(EngineRefusesError, match="LineEvent"):
            await connection.run(request(), "scripted", Heard())
