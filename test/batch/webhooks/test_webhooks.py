"""Webhooks: signed as OpenAI's client checks, told until heard."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import openai
import pytest

from batch.scenarios import SECRET, Scene, lines, opened
from batch.scripted_backend import ScriptedBackend
from certificates import own_authority
from sglang_coserve.batch.context import EventDelivery
from sglang_coserve.batch.record import BatchEvent
from sglang_coserve.batch.store import batch_rows
from sglang_coserve.batch.webhooks.delivery import WebhookTarget, events_delivered
from sglang_coserve.errors import ConfigError
from web_server import Call, WebServer, web_server


@contextmanager
def receiving(*statuses: int, context: ssl.SSLContext | None = None) -> Iterator[WebServer]:
    """A receiver that answers so at first, and then 200."""
    left = list(statuses)

    def answer(call: Call) -> None:
        status = left.pop(0) if left else 200
        # A name that no resolver can know.
        call.answer(status, **({"location": "http://xn--/"} if status == 302 else {}))

    with web_server(answer, context) as receiver:
        receiver.url += "/hook?a=b"
        yield receiver


def types(receiver: WebServer) -> list[str]:
    return [json.loads(call.content)["type"] for call in receiver.calls]


def delivery_to(target: WebhookTarget) -> EventDelivery:
    return partial(events_delivered, target=target)


@asynccontextmanager
async def told(
    directory: Path,
    *statuses: int,
    backend: ScriptedBackend | None = None,
    context: ssl.SSLContext | None = None,
) -> AsyncGenerator[tuple[Scene, WebServer]]:
    """A service, and who is told of the ends of its batches."""
    with receiving(*statuses, context=context) as receiver:
        target, rng = WebhookTarget(receiver.url, SECRET), random.Random(0)
        scene = await opened(directory, backend, event_delivery=delivery_to(target), rng=rng)
        async with scene.service:
            yield scene, receiver


async def pending(scene: Scene, within_s: float = 0.0) -> list[BatchEvent]:
    """What is to be delivered by then."""
    return await scene.service.context.store.run(
        batch_rows.due_events, scene.clock.now_s() + within_s, 100
    )


async def nothing_pending(scene: Scene) -> None:
    """Wait until every event is settled, or waits for another attempt."""
    while await pending(scene):
        scene.clock.advance(0.5)  # Somebody looks for events now and then.
        await asyncio.sleep(0.001)


async def test_a_completed_batch_is_told_and_the_official_client_believes_it(
    tmp_path: Path,
) -> None:
    async with told(tmp_path) as (scene, receiver):
        # OpenAI's client refuses what is not of today.
        scene.clock.advance(time.time() - scene.clock.now_s())
        batch = await scene.create(lines(2))
        await scene.ends(batch.id)
        await scene.clock.until(lambda: bool(receiver.calls))
        (call,) = receiver.calls
        headers, body = dict(call.headers), call.content
        assert (call.command, call.path) == ("POST", "/hook?a=b")
        client = openai.OpenAI(api_key="x", webhook_secret=SECRET)
        event = client.webhooks.unwrap(body, headers)
        assert (event.type, event.object, event.data.id) == (
            "batch.completed",
            "event",
            batch.id,
        )
        assert headers["webhook-id"] == event.id
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(body.replace(b"completed", b"cancelled"), headers)
        await nothing_pending(scene)


async def test_a_receiver_of_ones_own_authority_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = own_authority(tmp_path, monkeypatch)
    async with told(tmp_path, context=context) as (scene, receiver):
        await scene.create(lines(1))
        await scene.clock.until(lambda: bool(receiver.calls))
        assert types(receiver) == ["batch.completed"]


async def test_every_end_is_told(tmp_path: Path) -> None:
    async with told(tmp_path, backend=ScriptedBackend(holds=True)) as (scene, receiver):
        failed = await scene.create(b"no json\n")
        await scene.ends(failed.id)
        await scene.clock.until(lambda: len(receiver.calls) == 1)
        expired = await scene.create(lines(1), window="1s")
        await scene.ends(expired.id)
        await scene.clock.until(lambda: len(receiver.calls) == 2)
        cancelled = await scene.create(lines(1))
        await scene.service.change_batch("owner", cancelled.id, "cancel")
        await scene.ends(cancelled.id)
        await scene.clock.until(lambda: len(receiver.calls) == 3)
        assert types(receiver) == ["batch.failed", "batch.expired", "batch.cancelled"]


async def test_it_is_told_again_until_it_is_heard_and_then_no_more(tmp_path: Path) -> None:
    async with told(tmp_path, 500, 302, 429) as (scene, receiver):
        await scene.ends((await scene.create(lines(1))).id)
        times = []
        for count in range(1, 5):
            await scene.clock.until(lambda count=count: len(receiver.calls) == count)
            times.append(scene.clock.now_s())
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert gaps[0] < gaps[1] < gaps[2]
        await nothing_pending(scene)
        scene.clock.advance(86_400)
        await asyncio.sleep(0.05)
        assert len(receiver.calls) == 4
        assert len({call.headers["webhook-id"] for call in receiver.calls}) == 1


async def test_a_restart_tells_it_again_and_who_has_no_webhook_keeps_nothing(
    tmp_path: Path,
) -> None:
    async with (scene := await opened(tmp_path)).service:
        await scene.ends((await scene.create(lines(1))).id)
    ids = set()
    for status in (500, 200):
        async with told(tmp_path, status) as (scene, receiver):
            if not ids:
                await scene.ends((await scene.create(lines(1))).id)
            scene.clock.advance(60)
            await scene.clock.until(lambda: bool(receiver.calls))
            ids |= {call.headers["webhook-id"] for call in receiver.calls}
            await nothing_pending(scene)
    assert len(ids) == 1
    assert (await webhooks_pending(tmp_path)) == 0


async def webhooks_pending(directory: Path) -> int:
    async with (await opened(directory)).service as service:
        return (await service.status()).webhooks_pending


async def test_after_three_days_it_is_given_up(tmp_path: Path) -> None:
    async with told(tmp_path, 500, 500) as (scene, receiver):
        await scene.ends((await scene.create(lines(1))).id)
        await scene.clock.until(lambda: len(receiver.calls) == 1)
        await nothing_pending(scene)
        scene.clock.advance(4 * 86_400)
        await scene.clock.until(lambda: len(receiver.calls) == 2)
        await nothing_pending(scene)
        assert (await scene.service.status()).webhooks_pending == 0


async def tried(scene: Scene) -> None:
    """Wait until a delivery has failed."""
    give_up_s = time.monotonic() + 60
    while not any(event.attempts for event in await pending(scene, within_s=86_400)):
        assert time.monotonic() < give_up_s, "nothing was tried"
        scene.clock.advance(1)
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("address", ["::1%no zone", "not an address", ""])
async def test_an_address_that_is_none_does_not_end_the_deliveries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Whatever the resolver answers, or httpx2 says to it."""
    with receiving() as receiver:
        loop = asyncio.get_running_loop()
        look_up = loop.getaddrinfo

        async def bad_look_up(*args: object, **kwargs: object) -> list[object]:
            return [(0, 0, 0, "", (address, 0))]

        monkeypatch.setattr(loop, "getaddrinfo", bad_look_up)
        target = WebhookTarget(receiver.url.replace("127.0.0.1", "localhost"), SECRET)
        async with (scene := await opened(tmp_path, event_delivery=delivery_to(target))).service:
            await scene.ends((await scene.create(lines(1))).id)
            await tried(scene)
            monkeypatch.setattr(loop, "getaddrinfo", look_up)
            await scene.clock.until(lambda: bool(receiver.calls))
            await nothing_pending(scene)


@pytest.mark.parametrize("is_slow", [False, True])
async def test_an_answer_without_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """Not for a body without end, and not long for a head that comes byte by byte."""
    monkeypatch.setattr("sglang_coserve.batch.webhooks.delivery._TIMEOUT_S", 1.0)
    sent_bytes = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent_bytes
        await reader.readuntil(b"}}")
        try:
            if not is_slow:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                chunk = b"H" if is_slow else bytes(1 << 16)
                writer.write(chunk)
                await writer.drain()
                sent_bytes += len(chunk)
                await asyncio.sleep(0.1 if is_slow else 0)
        except ConnectionError:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        target = WebhookTarget(f"http://127.0.0.1:{port}/", SECRET)
        async with (scene := await opened(tmp_path, event_delivery=delivery_to(target))).service:
            await scene.ends((await scene.create(lines(1))).id)
            if is_slow:
                await tried(scene)
            else:
                await asyncio.wait_for(nothing_pending(scene), 30)
        assert sent_bytes < 64 << 20


@pytest.mark.parametrize(
    "url",
    ["", "hook", "ftp://a/b", "http://", "http://user:pw@a.org/", "http://[::1"],
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="--batch-webhook-url"):
        WebhookTarget(url, SECRET)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_c2hvcnQ=", "whsec_###", "whsec_ü"])
def test_weak_secrets_are_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(ConfigError, match="secret"):
        WebhookTarget("https://example.org/", secret)
    assert SECRET not in repr(WebhookTarget("https://example.org/", SECRET))
