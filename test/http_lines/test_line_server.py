"""Attempts at lines over a real socket: tokens, ends, closed connections, dead engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi.responses import RedirectResponse

from batch.scripted_backend import ENDPOINT, ScriptedBackend, answer, tokens_of
from http_lines.live_engine import ADMIN_KEY, READY_S, LiveEngine
from sglang_coserve.http_lines.engine_connection import EngineConnection
from sglang_coserve.http_lines.line_stream import LineStream
from sglang_coserve.http_lines.messages import (
    EngineLostError,
    EngineRefusesError,
    LineCall,
    LineEvent,
    decode_message,
    encode_message,
)
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.lines.backend import LineMovedError, LineRequest, LineResult, MovedKv


def request(name: str = "a", **body: Any) -> LineRequest:
    return LineRequest("batch_1", 1, ENDPOINT, {"prompt": name, **body})


def ignore(_tokens: Sequence[int]) -> None:
    pass


@asynccontextmanager
async def connected(
    backend: ScriptedBackend | None = None,
) -> AsyncGenerator[tuple[LiveEngine, EngineConnection]]:
    """An engine, and a connection to it."""
    async with (
        LiveEngine(backend) as engine,
        EngineConnection(engine.url, ADMIN_KEY) as connection,
    ):
        yield engine, connection


async def held(engine: LiveEngine, connection: EngineConnection) -> asyncio.Future[LineResult]:
    """An attempt at a line, which the engine has."""
    attempt = asyncio.ensure_future(connection.run(request(), "scripted", ignore))
    await engine.holds(1)
    return attempt


@asynccontextmanager
async def posting(
    engine: LiveEngine,
) -> AsyncGenerator[Callable[[bytes], Awaitable[httpx.Response]]]:
    """Send content to an engine's route."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with (
        engine,
        httpx.AsyncClient(base_url=engine.url, headers=headers, trust_env=False) as client,
    ):
        yield lambda content: client.post("/coserve/lines", content=content)


async def test_an_answer_of_any_length_comes_over() -> None:
    long = {"text": "x" * 3_000_000, "usage": {}}

    backend = ScriptedBackend(answers=lambda _: LineResult(200, "id", long))
    async with connected(backend) as (_, connection):
        assert (await connection.run(request(), "scripted", ignore)).body == long


def beat_every(monkeypatch: pytest.MonkeyPatch, heartbeat_s: float, silent_s: float) -> None:
    """Have engines say so often that they are there, and be lost when silent for so long."""
    monkeypatch.setattr("sglang_coserve.http_lines.line_stream.HEARTBEAT_S", heartbeat_s)
    monkeypatch.setattr("sglang_coserve.http_lines.engine_connection._SILENT_S", silent_s)


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
            await connection.run(request(), "scripted", ignore)


async def test_a_silent_engine_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_coserve.http_lines.engine_connection._SILENT_S", 0.2)
    async with connected() as (engine, connection):
        with pytest.raises(EngineLostError) as lost:
            await connection.run(request(), "scripted", ignore)
        assert lost.value.had_the_line
        await engine.holds(0)  # It notices that nobody listens.


async def test_lines_share_one_connection_and_end_one_by_one() -> None:
    async with connected() as (engine, connection):
        names = [f"{n}" for n in range(50)]
        attempts = {
            name: asyncio.ensure_future(connection.run(request(name), "scripted", ignore))
            for name in names
        }
        await engine.holds(len(names))
        assert engine.num_connections == 1
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
        bad = asyncio.ensure_future(connection.run(request("bad"), "scripted", refuse))
        good = asyncio.ensure_future(connection.run(request("good"), "scripted", ignore))
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
            connection.run(request("fails"), "scripted", ignore),
            connection.run(request(bad=True), "scripted", ignore),
            connection.run(request(), "scripted", ignore),
        )
        assert "out of luck" in fails.body["error"]["message"]
        for each in (fails, bad):
            assert (each.status_code, each.is_retryable) == (500, True)
        assert good.is_ok
        with pytest.raises(TypeError):
            await connection.run(request(bad=object()), "scripted", ignore)
        assert (await connection.run(request(), "scripted", ignore)).is_ok


async def test_a_line_that_is_too_large_ends_no_other() -> None:
    backend = ScriptedBackend(holds=True, limits=BodyLimits(max_bytes=1 << 10))
    async with connected(backend) as (engine, connection):
        small = await held(engine, connection)
        large = await connection.run(request(text="x" * 3_000_000), "scripted", ignore)
        assert (large.status_code, large.is_retryable) == (413, False)
        engine.backend.held("a").finish()
        assert (await small).is_ok


async def test_an_id_that_is_in_use_ends_the_stream_with_what_is_wrong() -> None:
    attempt = request().to_wire("scripted", 0.0)
    async with posting(engine := LiveEngine()) as post:
        answered = await post(2 * encode_message(LineCall(3, attempt)))
        assert "3 is in use" in answered.json()["fault"]
        await engine.holds(0)


async def test_a_request_with_all_its_calls_is_answered_to_its_end() -> None:
    attempt = request().to_wire("scripted", 0.0)
    async with posting(LiveEngine(ScriptedBackend())) as post:
        content = b"".join(encode_message(LineCall(n, attempt)) for n in (1, 2)).rstrip()
        answered = await post(content)
        events = [decode_message(line, LineEvent) for line in answered.content.splitlines() if line]
        assert {event.id: event.result for event in events} == {
            1: answer(request()),
            2: answer(request()),
        }


async def test_an_engine_that_dies_has_had_the_line_and_one_that_is_gone_has_not() -> None:
    async with connected() as (engine, connection):
        attempt = await held(engine, connection)
        await engine.kill()
        with pytest.raises(EngineLostError) as lost:
            await attempt
        assert lost.value.had_the_line
        with pytest.raises(EngineLostError) as lost:
            await connection.run(request(), "scripted", ignore)
        assert not lost.value.had_the_line


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
            await connection.run(request(), "scripted", ignore)
        engine.backend.is_changing, engine.backend.model = False, "another"
        with pytest.raises(LineMovedError, match=r"another.*scripted"):
            await connection.run(request(), "scripted", ignore)


async def test_lines_go_elsewhere_once_the_engine_serves_none_until_its_next_start() -> None:
    async with connected() as (engine, connection):
        attempt = await held(engine, connection)
        engine.backend.stalled_by = "no plans"
        engine.lines.take_out("no plans")
        with pytest.raises(LineMovedError, match="no plans"):
            await attempt
        with pytest.raises(LineMovedError, match="no plans"):
            await connection.run(request(), "scripted", ignore)
        assert (await connection.describe()).refuses == "no plans"


async def test_only_the_admin_key_opens_the_routes() -> None:
    async with LiveEngine() as engine:
        async with EngineConnection(engine.url, "guess") as connection:
            with pytest.raises(EngineRefusesError, match="--engine-admin-key"):
                await connection.describe()
            with pytest.raises(EngineRefusesError, match="--engine-admin-key"):
                await connection.run(request(), "scripted", ignore)
        assert engine.backend.started == []


async def test_what_is_no_attempt_is_refused_with_what_is_wrong() -> None:
    limits = BodyLimits(max_bytes=1 << 10)
    engine = LiveEngine(ScriptedBackend(limits=limits))
    async with posting(engine) as post, EngineConnection(engine.url, ADMIN_KEY) as connection:
        bad = await post(b'{"line": "one"}')
        assert "LineCall" in bad.json()["fault"]
        event = (await post(b'{"id":7,"attempt":{"line": "one"}}')).json()
        assert (event["id"], event["result"]["status_code"]) == (7, 400)
        assert "attempt" in event["result"]["body"]["error"]["message"]
        described = await connection.describe()
        assert described.limits == limits
        assert (described.model, described.endpoints) == (
            "scripted",
            ("/v1/chat/completions", ENDPOINT, "/v1/responses"),
        )


async def test_another_program_is_told_apart_and_the_key_is_sent_nowhere_else() -> None:
    async with LiveEngine() as engine, LiveEngine() as other:

        async def elsewhere() -> RedirectResponse:
            return RedirectResponse(f"{other.url}/coserve/load")

        engine.app.add_api_route("/moved", elsewhere)
        async with EngineConnection(engine.url, ADMIN_KEY) as connection:
            with pytest.raises(EngineRefusesError, match="307"):
                await connection.ask("/moved")
            with pytest.raises(EngineRefusesError, match="404"):
                await connection.ask("/nothing")


async def test_a_line_that_is_asked_back_comes_with_its_tokens_and_what_was_left_of_it() -> None:
    async def run_one(connection: EngineConnection, engine: LiveEngine) -> LineResult:
        task = asyncio.ensure_future(connection.run(request("more"), "scripted", lambda _: None))
        await engine.holds(1)
        engine.backend.held("more").finish()
        return await task

    async with connected() as (engine, connection):
        requests = [request("moves"), request("stays")]
        heard: list[int] = []
        prompts: list[int] = []
        connection.ask_back(requests[0])  # Nobody has it yet.
        tasks = [
            asyncio.ensure_future(connection.run(each, "scripted", heard.extend, prompts.append))
            for each in requests
        ]
        await engine.holds(2)
        engine.backend.leaves = MovedKv("0" * 32, 48)
        for _ in range(2):
            engine.backend.held("moves").generate(2)
            await asyncio.sleep(0.05)
        for _ in range(2):
            connection.ask_back(requests[0])
        with pytest.raises(LineMovedError, match="asked for") as error:
            await tasks[0]
        assert error.value.kv == engine.backend.leaves
        assert heard == tokens_of("moves", 5)
        assert prompts == [len("moves")]
        connection.ask_back(requests[0])  # It has ended meanwhile.
        engine.backend.leaves = None
        connection.ask_back(requests[1])  # It cannot leave: it is aborted, and goes on elsewhere.
        with pytest.raises(LineMovedError) as error:
            await tasks[1]
        assert error.value.kv is None
        assert (await run_one(connection, engine)).is_ok


async def test_nothing_stays_of_a_line_that_is_given_up_before_its_tokens_were_sent() -> None:
    def unsent(stream: LineStream) -> dict[str, int]:
        return {name: len(value) for name, value in vars(stream).items() if type(value) is dict}

    backend = ScriptedBackend(holds=True)
    stream = LineStream(backend, lambda _: None, backend.limits)
    nothing = unsent(stream)
    for number in range(1, 9):
        call = encode_message(LineCall(number, request(f"{number}").to_wire("scripted", 0.0)))
        stream._take({"type": "http.request", "body": call, "more_body": True})
        while not backend.in_flight:
            await asyncio.sleep(0)
        backend.held(f"{number}").generate(2)
        call = encode_message(LineCall(number, None))
        stream._take({"type": "http.request", "body": call, "more_body": True})
        while stream.num_in_flight:
            await asyncio.sleep(0)
        assert unsent(stream) == nothing


async def test_an_engine_that_cannot_take_what_it_is_asked_for_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Deaf, it would seem to work for as long as it sends its heartbeat."""

    begin = LineStream._begin

    def fail(stream: LineStream, number: int, attempt: LineRequest) -> None:
        if attempt.body["prompt"] == "bad":
            raise ArithmeticError("out of luck")
        begin(stream, number, attempt)

    monkeypatch.setattr(LineStream, "_begin", fail)
    monkeypatch.setattr("sglang_coserve.http_lines.line_stream.HEARTBEAT_S", 0.05)
    for come_together in (True, False):
        async with connected() as (engine, connection):
            attempts = [asyncio.ensure_future(connection.run(request(), "scripted", ignore))]
            if not come_together:
                await engine.holds(1)
            bad = connection.run(request("bad"), "scripted", ignore)
            attempts.append(asyncio.ensure_future(bad))
            for attempt in attempts:
                with pytest.raises(EngineLostError):
                    await asyncio.wait_for(attempt, 30)
            await engine.holds(0)


async def test_an_engine_that_is_sent_line_after_line_is_not_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beat_every(monkeypatch, 0.1, 2.0)
    async with connected() as (engine, connection):
        attempt = await held(engine, connection)
        others = []
        for number in range(50):
            run = connection.run(request(f"{number}"), "scripted", ignore)
            others.append(asyncio.ensure_future(run))
            await asyncio.sleep(0.06)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert not attempt.done()
        engine.backend.held("a").finish()
        assert (await attempt).is_ok
