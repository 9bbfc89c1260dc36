"""Streams of offline requests that wait: empty lines, and what the route says after them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message

from sglang_coserve.errors import RequestError
from sglang_coserve.srt.marks.answers import is_refused, kept_alive
from sglang_coserve.srt.marks.marks_middleware import MarksMiddleware

START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream")],
}
INTERVAL_S = 0.01
EMPTY = b"\n\n"


def piece(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Client:
    """What a client gets, message by message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)

    async def kept_alive(self, count: int) -> None:
        """Wait until it has been, so many times."""
        async with asyncio.timeout(30):
            while sum(m.get("body") == EMPTY for m in self.messages) < count:
                await asyncio.sleep(INTERVAL_S / 10)

    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages)

    def events(self) -> bytes:
        """All but the empty lines; as SGLang's bench_serving reads it, line by line."""
        lines = self.body().split(b"\n")
        assert all(line.startswith(b"data: ") for line in lines if line)
        return b"\n".join(filter(None, lines))

    @property
    def starts(self) -> list[Message]:
        return [m for m in self.messages if m["type"] == "http.response.start"]


async def test_empty_lines_come_before_the_first_event_and_between_events() -> None:
    client = Client()
    async with kept_alive(client, INTERVAL_S) as send:
        await client.kept_alive(2)
        await send(START)
        await send(piece(b"data: 1\n\n"))
        await client.kept_alive(3)
        await send(piece(b"data: [DONE]\n\n"))
        await send(piece(b"", more=False))
        said = len(client.messages)
        await asyncio.sleep(5 * INTERVAL_S)
        assert len(client.messages) == said
    assert len(client.starts) == 1 and client.starts[0]["status"] == 200
    assert client.events() == b"data: 1\ndata: [DONE]"


async def test_no_empty_line_tears_an_event() -> None:
    client = Client()
    async with kept_alive(client, INTERVAL_S) as send:
        await send(START)
        await send(piece(b"data: {"))
        await asyncio.sleep(5 * INTERVAL_S)
        await send(piece(b"}\n\n"))
        await client.kept_alive(1)
    assert b"data: {}\n\n" in client.body()


@pytest.mark.parametrize("error", [{"error": {"message": "no", "code": 1}}, {"message": "no"}])
async def test_an_error_after_empty_lines_is_an_event(error: dict[str, Any]) -> None:
    client = Client()
    async with kept_alive(client, INTERVAL_S) as send:
        await client.kept_alive(1)
        await send({"type": "http.response.start", "status": 400, "headers": []})
        content = json.dumps(error).encode()
        await send(piece(content[:5]))
        await send(piece(content[5:], more=False))
    assert len(client.starts) == 1
    event = json.loads(client.events().removeprefix(b"data: "))
    assert event["error"]["message"] == "no"
    assert client.messages[-1].get("more_body", False) is False


async def test_an_answer_that_comes_in_time_is_as_it_was() -> None:
    client = Client()
    sent = [{"type": "http.response.start", "status": 400, "headers": []}, piece(b"no", more=False)]
    async with kept_alive(client, 60) as send:
        for message in sent:
            await send(message)
    assert client.messages == sent


@pytest.mark.parametrize(
    ("path", "body", "streams"),
    [
        ("/v1/completions", {"stream": True, "service_tier": "flex"}, True),
        ("/v1/completions", {"stream": False, "service_tier": "flex"}, False),
        ("/v1/completions", {"stream": True, "service_tier": "default"}, False),
        ("/api/chat", {"stream": True, "coserve_class": "offline"}, False),
    ],
)
async def test_empty_lines_are_for_events_of_offline_requests(
    path: str, body: dict[str, Any], streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        used.append(type(getattr(send, "__self__", send)).__name__)

    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    scope = {"type": "http", "path": path, "method": "POST", "headers": []}
    await MarksMiddleware(app)(scope, receive, Client())
    assert (used == ["_Stream"]) == streams


async def test_room_that_comes_in_time_is_waited_for() -> None:
    answers = [False, False, True]

    async def has_room() -> bool:
        return answers.pop(0)

    client = Client()
    assert not await is_refused([(b"x-coserve-wait", b"60s")], has_room, client)
    assert not await is_refused([], has_room, client)
    assert not answers and not client.messages
    with pytest.raises(RequestError, match="at most 600s"):
        await is_refused([(b"x-coserve-wait", b"24h")], has_room, client)
    answers = [False]
    assert await is_refused([(b"x-coserve-wait", b"0")], has_room, client)
    assert client.starts[0]["status"] == 429
