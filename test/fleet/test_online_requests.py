"""One address: online requests through a gateway, as the router behind it gets and answers them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from starlette.types import Receive, Scope, Send
from yarl import URL

from batch.scripted_backend import ScriptedBackend, answer
from http_lines.live_engine import ADMIN_KEY, READY_S, LiveApp, LiveEngine
from sglang_coserve.errors import ConfigError
from sglang_coserve.fleet import online_requests
from sglang_coserve.fleet.gateway import gateway_app
from sglang_coserve.fleet.options import parse_options
from sglang_coserve.lines.backend import LineMovedError, LineRequest, LineResult, MovedKv
from waiting import until


class RecordingRouter:
    """Answers as it is told, and keeps what it got."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes, list[tuple[bytes, bytes]], bytes]] = []
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        """What a stream sends; None ends it."""

        self.clients_left = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, is_whole = b"", False
        while not is_whole:
            message = await receive()
            body += message.get("body", b"")
            is_whole = not message.get("more_body", False)
        path = scope["raw_path"] + b"?" + scope["query_string"]
        self.seen.append((scope["method"], path, list(scope["headers"]), body))
        if b'"stream"' in body:
            await self._stream(receive, send)
            return
        headers = [
            (b"x-engine", b"7"),
            (b"x-request-id", b"own"),
            (b"set-cookie", b"a=1"),
            (b"set-cookie", b"b=2"),
        ]
        await send({"type": "http.response.start", "status": 429, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": {"code": "busy"}}'})

    async def _stream(self, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        leaving = asyncio.ensure_future(receive())
        while True:
            piece = asyncio.ensure_future(self.pieces.get())
            await asyncio.wait((piece, leaving), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                piece.cancel()
                self.clients_left += 1
                return
            content = piece.result()
            if content == b"break":
                raise ConnectionError("it breaks")
            message = {"type": "http.response.body", "body": content or b"", "more_body": True}
            await send({**message, "more_body": content is not None})
            if content is None:
                leaving.cancel()
                return


@asynccontextmanager
async def gateway_before(
    directory: Path, *flags: str, engine: str = "http://127.0.0.1:1", key: str = ADMIN_KEY
) -> AsyncGenerator[str]:
    """A gateway, by default without engines, once it has opened its batches."""
    own = ("--engine", engine, "--engine-admin-key", key)
    options = parse_options((*own, "--coserve-data-dir", str(directory / "data"), *flags))
    failures: list[Exception] = []
    async with LiveApp(gateway_app(options, failures.append), lifespan="on") as served:
        async with httpx.AsyncClient() as client, asyncio.timeout(READY_S):
            while (await client.get(f"{served.url}/v1/batches")).status_code == 503:
                await asyncio.sleep(0.02)
        yield served.url
    assert not failures


@asynccontextmanager
async def one_address(directory: Path, *flags: str) -> AsyncGenerator[tuple[str, RecordingRouter]]:
    router = RecordingRouter()
    async with AsyncExitStack() as stack:
        behind = await stack.enter_async_context(LiveApp(router))
        gateway = gateway_before(directory, "--router", behind.url, *flags)
        url = await stack.enter_async_context(gateway)
        yield url, router


async def test_a_header_beyond_ascii_passes_unchanged(tmp_path: Path) -> None:
    async with one_address(tmp_path) as (url, router), httpx.AsyncClient() as client:
        name = "André".encode()
        await client.post(f"{url}/v1/completions", content=b"{}", headers={b"x-user": name})
        assert dict(router.seen[0][2])[b"x-user"] == name


async def test_requests_and_answers_pass_unchanged(tmp_path: Path) -> None:
    async with one_address(tmp_path) as (url, router), httpx.AsyncClient() as client:
        sent = b'{"model": "m",  "text": "\xc3\xa9\\ud83d"}'
        headers = {"authorization": "Bearer k", "x-request-id": "r-1", "te": "trailers"}
        answer = await client.post(
            f"{url}/v1/chat/completions?a=%2Fb&c", content=sent, headers=headers
        )
        method, path, got, body = router.seen[0]
        assert (method, path, body) == ("POST", b"/v1/chat/completions?a=%2Fb&c", sent)
        assert dict(got)[b"authorization"] == b"Bearer k"
        assert dict(got)[b"x-request-id"] == b"r-1"
        assert dict(got)[b"content-length"] == str(len(sent)).encode()
        assert b"te" not in dict(got)
        assert answer.status_code == 429
        assert answer.json() == {"error": {"code": "busy"}}
        assert answer.headers["x-engine"] == "7"
        assert answer.headers.get_list("x-request-id") == ["r-1"]
        assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
        made = (await client.get(f"{url}/v1/responses/resp_1")).headers["x-request-id"]
        assert dict(router.seen[1][2])[b"x-request-id"] == made.encode()
        assert router.seen[1][:2] == ("GET", b"/v1/responses/resp_1?")


@pytest.mark.parametrize("path", ["/generate/../workers", "/v1/responses/%2E%2e%2F../flush_cache"])
async def test_no_path_leads_to_what_a_routers_operator_does(tmp_path: Path, path: str) -> None:
    async with one_address(tmp_path) as (url, router), aiohttp.ClientSession() as client:
        async with client.post(URL(f"{url}{path}", encoded=True), data=b"{}") as answer:
            assert answer.status == 404
            assert "'..'" in (await answer.json())["error"]["message"]
        assert not router.seen


async def test_a_body_that_comes_in_pieces_goes_on_in_pieces(tmp_path: Path) -> None:
    async def pieces() -> AsyncGenerator[bytes]:
        for _ in range(3):
            yield b"x" * 70_000

    async with one_address(tmp_path) as (url, router), httpx.AsyncClient() as client:
        await client.post(f"{url}/v1/audio/transcriptions", content=pieces())
        *_, headers, body = router.seen[0]
        assert body == b"x" * 210_000
        assert dict(headers)[b"transfer-encoding"] == b"chunked"


async def test_each_piece_of_a_stream_comes_when_the_router_sends_it(tmp_path: Path) -> None:
    async with one_address(tmp_path) as (url, router):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
        asking = asyncio.ensure_future(
            client.completions.create(model="m", prompt="hi", stream=True)
        )
        stream = None
        for text in ("a", "b\u2028c"):
            event = {"choices": [{"index": 0, "text": text, "finish_reason": None}]}
            await router.pieces.put(b"data: " + json.dumps(event).encode() + b"\n\n")
            async with asyncio.timeout(READY_S):
                stream = stream or await asking
                assert (await anext(stream)).choices[0].text == text
        await stream.close()
        await until(lambda: router.clients_left == 1)


async def test_who_hangs_up_before_the_first_piece_is_gone_for_the_router(tmp_path: Path) -> None:
    async with one_address(tmp_path) as (url, router), aiohttp.ClientSession() as client:
        asking = asyncio.ensure_future(
            client.post(f"{url}/v1/completions", json={"stream": True, "prompt": "hi"})
        )
        await until(lambda: len(router.seen) == 1)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await asking).close()
        await until(lambda: router.clients_left == 1)


async def test_what_breaks_behind_the_gateway_does_not_look_whole(tmp_path: Path) -> None:
    async with one_address(tmp_path) as (url, router), httpx.AsyncClient() as client:
        await router.pieces.put(b"data: {}\n\n")
        await router.pieces.put(b"break")
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(f"{url}/v1/completions", json={"stream": True})


async def test_without_the_router_requests_are_told_so_and_batches_go_on(tmp_path: Path) -> None:
    dead = "http://127.0.0.1:1"
    async with gateway_before(tmp_path, "--router", dead) as url, httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/v1/completions", json={})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "router_unreachable"
        assert dead in answer.json()["error"]["message"]
        assert (await client.get(f"{url}/v1/batches")).status_code == 200


async def test_keys_are_checked_before_anything_passes_but_what_browsers_ask_first(
    tmp_path: Path,
) -> None:
    async with one_address(tmp_path, "--api-key", "k") as (url, router):
        async with httpx.AsyncClient() as client:
            assert (await client.post(f"{url}/v1/completions", json={})).status_code == 401
            await client.options(f"{url}/v1/completions", headers={"origin": "http://page"})
        assert [method for method, *_ in router.seen] == ["OPTIONS"]


async def test_what_a_routers_operator_does_does_not_pass(tmp_path: Path) -> None:
    async with one_address(tmp_path) as (url, router), httpx.AsyncClient() as client:
        for path in ("/workers", "/flush_cache", "/v1/loads", "/v1/chat", "/generate_x"):
            assert (await client.post(f"{url}{path}", json={})).status_code == 404
        assert not router.seen


@pytest.mark.parametrize("known", [(), ("--engine-router", "http://router.example:8000")])
async def test_a_gateway_without_a_router_says_where_online_requests_go(
    tmp_path: Path, known: tuple[str, ...]
) -> None:
    async with gateway_before(tmp_path, *known) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
        with pytest.raises(openai.NotFoundError) as refused:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}]
            )
        assert "--router" in refused.value.message
        assert all(each in refused.value.message for each in known[1:])
        assert refused.value.code == "not_found"


KV = MovedKv("0" * 32, 48)


def leaves_kv(request: LineRequest) -> LineResult:
    raise LineMovedError("asked for", KV)


@asynccontextmanager
async def pushing(directory: Path, engine: LiveEngine) -> AsyncGenerator[tuple[str, Any]]:
    """A gateway that pushes, once it knows that ``engine`` is up."""
    router = RecordingRouter()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(engine)
        behind = await stack.enter_async_context(LiveApp(router))
        flags = ("--router", behind.url, "--push-prompts")
        gateway = gateway_before(directory, *flags, engine=engine.url)
        url = await stack.enter_async_context(gateway)
        async with httpx.AsyncClient() as client:
            while (await fleet_of(client, url))["engines"][0]["state"] != "up":
                await asyncio.sleep(0.01)
        yield url, router


async def fleet_of(client: httpx.AsyncClient, url: str) -> Any:
    return (await client.get(f"{url}/coserve/status")).json()["fleet"]


async def passed(
    url: str, router: RecordingRouter, content: bytes, headers: dict[str, str] | None = None
) -> bytes:
    """What the router gets of a body."""
    async with httpx.AsyncClient() as client:
        await client.post(f"{url}/v1/completions", content=content, headers=headers)
    *_, headers, body = router.seen[-1]
    assert dict(headers)[b"content-length"] == str(len(body)).encode()
    return body


async def test_a_prompt_is_computed_by_a_relaxed_engine_first(tmp_path: Path) -> None:
    backend = ScriptedBackend(answers=leaves_kv)
    async with pushing(tmp_path, LiveEngine(backend, pool="relaxed")) as (url, router):
        sent = b' {"prompt": "hi",  "coserve_slo_ttft_ms": 9, "service_tier": "auto", "n": 1}'
        mark = b'{"coserve_kv":["%s",48],' % KV.name.encode()
        assert await passed(url, router, sent) == mark + sent[2:]
        (asked,) = backend.started
        assert asked.only_prompt and asked.endpoint == "/v1/completions"
        assert asked.body == {"prompt": "hi", "n": 1}
        async with httpx.AsyncClient() as client:
            assert (await fleet_of(client, url))["prompts_pushed"] == 1


HI = b'{"prompt": "hi"}'
FLEX = b'{"prompt": "hi", "service_tier": "flex"}'


async def test_what_is_offline_or_malformed_passes_unchanged(tmp_path: Path) -> None:
    backend = ScriptedBackend(answers=leaves_kv)
    async with pushing(tmp_path, LiveEngine(backend, pool="relaxed")) as (url, router):
        for sent, headers in (
            (FLEX, {}),
            (b'{"prompt": "hi", "coserve_class": "offline"}', {}),
            (b'{"prompt": "hi", "custom_params": {"coserve_class": "offline"}}', {}),
            (b'{"prompt": ', {}),
            (b'["prompt"]', {}),
            (HI, {"x-llm-d-inference-objective": "batch-7"}),
            (HI, {"x-gateway-inference-objective": "flex"}),
        ):
            assert await passed(url, router, sent, headers) == sent
        assert not backend.started
        # As at the engines, a gateway's header overrides what the client says.
        assert await passed(url, router, FLEX, {"x-llm-d-inference-objective": "chat"}) != FLEX


@pytest.mark.parametrize("fails", ["answers", "refuses", "hangs", "ends", "is strict"])
async def test_without_kv_a_request_passes_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    holds = fails in ("hangs", "ends")
    backend = ScriptedBackend(holds=holds, answers=answer if fails == "answers" else leaves_kv)
    engine = LiveEngine(backend, pool="strict" if fails == "is strict" else "relaxed")
    if fails == "hangs":
        monkeypatch.setattr(online_requests, "_PUSH_TIMEOUT_S", 0.2)
    async with pushing(tmp_path, engine) as (url, router):
        if fails == "refuses":
            engine.lines.close("it drains")
        passing = asyncio.ensure_future(passed(url, router, HI))
        if fails == "ends":
            await engine.holds(1)
            await engine.kill()
        assert await passing == HI
        if fails == "hangs":
            await engine.holds(0)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--push-prompts",), "--router"),
        # As of a file with a line break at its end.
        (("--engine-admin-key", "k\n"), "line break"),
        (("--api-key", "k\n"), "line break"),
        (("--api-key", "k "), "space"),
        (("--admin-api-key", "k\n"), "line break"),
        (("--engine", "http://a:1/v1"), "http://a:1/v1"),
        (("--engine", "http://a:1?b=c"), "use http://HOST:PORT"),
        (("--engine", "http://user:pw@a:1"), "neither a user name"),
        (("--router", "http://user:pw@a:1"), "neither a user name"),
    ],
)
def test_what_no_gateway_could_use_is_told_before_it_starts(
    flags: tuple[str, ...], says: str
) -> None:
    given = ("--engine", "http://a:1", "--engine-admin-key", "k", "--coserve-data-dir", "d")
    with pytest.raises(ConfigError, match=says):
        parse_options((*given, *flags))
