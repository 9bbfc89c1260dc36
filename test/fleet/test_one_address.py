"""One address: the compose example's nginx before a gateway with an engine, and a router."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import httpx2
import openai
import pytest
from starlette.types import Receive, Scope, Send
from yarl import URL

from batch.scenarios import lines
from batch.scripted_backend import ScriptedBackend, tokens_of
from fleet.live_nginx import NEEDS_NGINX, running_nginx
from http_lines.live_engine import ADMIN_KEY, READY_S, LiveApp, LiveEngine
from sglang_coserve.fleet.gateway import gateway_app
from sglang_coserve.fleet.options import parse_options
from sglang_coserve.web.asgi import ENGINE_PATHS
from waiting import until

CONFIG = Path(__file__).parents[2] / "docs" / "examples" / "compose" / "nginx.conf"
pytestmark = NEEDS_NGINX


class ScriptedRouter:
    """Answers as it is told, and keeps what it got."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, dict[bytes, bytes], bytes]] = []
        """Method, path, headers and body."""

        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        """What a stream sends; None ends it."""

        self.clients_left = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, is_whole = b"", False
        while not is_whole:
            message = await receive()
            body += message.get("body", b"")
            is_whole = not message.get("more_body", False)
        self.seen.append((scope["method"], scope["path"], dict(scope["headers"]), body))
        if b'"stream":true' in body:
            await self._stream(receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"x-engine", b"7")]
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
            message = {"type": "http.response.body", "body": content or b""}
            await send({**message, "more_body": content is not None})
            if content is None:
                leaving.cancel()
                return


@dataclass
class Fleet:
    """A gateway and a router behind one address."""

    url: str
    router: ScriptedRouter
    gateway: LiveApp

    @property
    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="k", max_retries=0)


@asynccontextmanager
async def nginx(directory: Path, **servers: LiveApp) -> AsyncGenerator[str]:
    """The example's nginx, with ports that are free."""
    addresses = {
        "server gateway:30000;": f"server 127.0.0.1:{servers['gateway'].port};",
        "server router:30080;": f"server 127.0.0.1:{servers['router'].port};",
    }
    async with running_nginx(directory, CONFIG.read_text(), addresses) as url:
        yield url


@asynccontextmanager
async def one_address(directory: Path, *flags: str) -> AsyncGenerator[Fleet]:
    router, failures = ScriptedRouter(), list[Exception]()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(LiveEngine(ScriptedBackend()))
        behind = await stack.enter_async_context(LiveApp(router))
        own = ("--engine", engine.url, "--engine-admin-key", ADMIN_KEY)
        data = ("--coserve-data-dir", str(directory / "data"))
        app = gateway_app(parse_options((*own, *data, *flags)), failures.append)
        gateway = await stack.enter_async_context(LiveApp(app, lifespan="on"))
        url = await stack.enter_async_context(nginx(directory, gateway=gateway, router=behind))
        async with httpx2.AsyncClient() as client, asyncio.timeout(READY_S):
            while (await client.get(f"{gateway.url}/health")).status_code == 503:
                await asyncio.sleep(0.02)
        yield Fleet(url, router, gateway)
    assert not failures


async def test_a_batch_of_openais_client_completes(tmp_path: Path) -> None:
    async with one_address(tmp_path) as fleet:
        client = fleet.client
        # More than nginx takes by default.
        content = lines(2, note="n" * (1 << 20))
        file = await client.files.create(file=("input.jsonl", content), purpose="batch")
        assert file.bytes == len(content) > 2 << 20
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        async with asyncio.timeout(READY_S):
            while batch.status != "completed":
                await asyncio.sleep(0.02)
                batch = await client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        output = (await client.files.content(batch.output_file_id)).content
        assert {json.loads(line)["custom_id"] for line in output.splitlines()} == {"id-1", "id-2"}
        upload = await client.uploads.create(
            bytes=5, filename="input.jsonl", mime_type="text/plain", purpose="batch"
        )
        await client.uploads.cancel(upload.id)
        assert not fleet.router.seen


async def test_each_piece_of_a_stream_comes_when_the_router_sends_it(tmp_path: Path) -> None:
    async with one_address(tmp_path) as fleet:
        asking = asyncio.ensure_future(
            fleet.client.completions.create(model="m", prompt="hi", stream=True)
        )
        stream = None
        for text in ("a", "b"):
            event = {"choices": [{"index": 0, "text": text, "finish_reason": None}]}
            await fleet.router.pieces.put(b"data: " + json.dumps(event).encode() + b"\n\n")
            async with asyncio.timeout(READY_S):
                stream = stream or await asking
                assert (await anext(stream)).choices[0].text == text
        assert stream is not None
        await stream.close()
        await until(lambda: fleet.router.clients_left == 1)


async def test_what_breaks_behind_the_address_does_not_look_whole(tmp_path: Path) -> None:
    async with one_address(tmp_path) as fleet, httpx2.AsyncClient() as client:
        for piece in (b"data: {}\n\n", b"break"):
            await fleet.router.pieces.put(piece)
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.post(f"{fleet.url}/v1/completions", content=b'{"stream":true}')


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_who_hangs_up_before_the_first_piece_is_gone_for_the_router(
    tmp_path: Path, path: str
) -> None:
    async with one_address(tmp_path) as fleet, aiohttp.ClientSession() as client:
        body = b'{"stream":true}'
        asking = asyncio.ensure_future(client.post(f"{fleet.url}{path}", data=body))
        await until(lambda: len(fleet.router.seen) == 1)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await asking).close()
        await until(lambda: fleet.router.clients_left == 1)


async def test_responses_in_the_background_are_the_gateways(tmp_path: Path) -> None:
    async with one_address(tmp_path) as fleet:
        client = fleet.client
        response = await client.responses.create(model="scripted", input="one", background=True)
        async with asyncio.timeout(READY_S):
            while response.status != "completed":
                await asyncio.sleep(0.02)
                response = await client.responses.retrieve(response.id)
        assert response.output_text == " ".join(map(str, tokens_of("one", 4)))
        await client.responses.cancel(response.id)
        await client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError, match="stream"):
            await client.responses.create(input="one", background=True, stream=True)
        assert not fleet.router.seen


@pytest.mark.parametrize("size", [1, 1 << 20], ids=["in memory", "on disk"])
async def test_other_responses_go_on_to_the_router_as_they_came(tmp_path: Path, size: int) -> None:
    async with one_address(tmp_path) as fleet, httpx2.AsyncClient() as client:
        sent = json.dumps({"input": "x" * size, "background": False}).encode()
        headers = {"authorization": "Bearer k", "x-request-id": "r-1"}
        answer = await client.post(f"{fleet.url}/v1/responses?a=b", content=sent, headers=headers)
        assert answer.status_code == 429 and answer.json() == {"error": {"code": "busy"}}
        assert answer.headers["x-engine"] == "7"
        ((method, path, got, body),) = fleet.router.seen
        assert (method, path, body) == ("POST", "/v1/responses", sent)
        assert got[b"authorization"] == b"Bearer k" and got[b"x-request-id"] == b"r-1"
        await client.get(f"{fleet.url}/v1/responses/resp_{0:032x}")
        assert fleet.router.seen[1][:2] == ("GET", f"/v1/responses/resp_{0:032x}")


async def test_all_that_clients_may_ask_of_the_router_arrives(tmp_path: Path) -> None:
    paths = [path for path in ENGINE_PATHS if path.startswith("/v1/")]
    async with one_address(tmp_path) as fleet, httpx2.AsyncClient() as client:
        for path in (*paths, "/v1/models", "/v1/unknown"):
            answer = await client.post(f"{fleet.url}{path}", json={"model": "m"})
            assert answer.status_code == 429
            assert fleet.router.seen[-1][:2] == ("POST", path)


async def test_what_operators_do_is_not_at_the_address(tmp_path: Path) -> None:
    async with one_address(tmp_path) as fleet, aiohttp.ClientSession() as client:
        for path in (
            *("/workers", "/flush_cache", "/v1/loads", "/v1/tokenizers/a", "/coserve/batches"),
            *("/v1/chat/../../workers", "/v1/%2e%2e/workers", "/v1/..%2fworkers", "//workers"),
        ):
            url = URL(f"{fleet.url}{path}", encoded=True)
            async with client.post(url, data=b"{}") as answer:
                assert answer.status == 404
        assert not fleet.router.seen


async def test_keys_are_checked_by_who_answers(tmp_path: Path) -> None:
    async with one_address(tmp_path, "--api-key", "k") as fleet:
        async with httpx2.AsyncClient() as client:
            for path in ("/v1/responses", "/v1/batches"):
                assert (await client.post(f"{fleet.url}{path}", json={})).status_code == 401
        assert not fleet.router.seen
        assert not (await fleet.client.batches.list()).data


async def test_without_the_gateway_online_requests_go_on(tmp_path: Path) -> None:
    async with one_address(tmp_path) as fleet:
        await fleet.gateway.kill()
        with pytest.raises(openai.InternalServerError):
            await fleet.client.batches.list()
        with pytest.raises(openai.RateLimitError):
            await fleet.client.completions.create(model="m", prompt="hi")
