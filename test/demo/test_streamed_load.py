"""What becomes of streams, by what a server sends."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from sglang_coserve.demo.loads import StreamedLoad, StreamedRequest
from sglang_coserve.metrics import Outcome, RequestTimeline
from waiting import until

GIVE_UP_S = 30


@asynccontextmanager
async def serving(stream: bytes, status: str = "200 OK") -> AsyncGenerator[str]:
    """An HTTP server that answers every request with ``stream``, a byte at a time."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        # What is left unread would reset the connection.
        (size,) = re.findall(rb"content-length: (\d+)", request.lower())
        await reader.readexactly(int(size))
        head = f"HTTP/1.1 {status}\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        writer.write(head.encode())
        for index in range(len(stream)):
            writer.write(stream[index : index + 1])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


async def timeline(stream: bytes, status: str = "200 OK") -> RequestTimeline:
    async with serving(stream, status) as url, asyncio.timeout(GIVE_UP_S):
        request = StreamedRequest("a", "/v1/completions", {})
        async with StreamedLoad(url, [request], arrivals_s=[0.0], drain_s=GIVE_UP_S) as load:
            await load.finished()
            (found,) = load.timelines(load.began_s)
            return found


def event(text: str, tokens: int, reason: str | None = None) -> bytes:
    body: dict[str, Any] = {"choices": [{"text": text, "finish_reason": reason}]}
    body["usage"] = {"prompt_tokens": 3, "completion_tokens": tokens}
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c", "\n"])
async def test_a_separator_in_a_text_ends_no_event(separator: str) -> None:
    stream = event(f"a{separator}b", 1) + b": a comment\n\n" + event(separator, 3, "stop") + DONE
    found = await timeline(stream)
    assert (found.outcome, len(found.token_times_s), found.prompt_tokens) == (
        Outcome.FINISHED,
        *(3, 3),
    )


@pytest.mark.parametrize(
    ("stream", "status"),
    [
        (event("a", 1), "200 OK"),
        (event("a", 1) + b"data: {cut\n\n", "200 OK"),
        (event("a", 1, "abort") + DONE, "200 OK"),
        (b'data: {"error": {"message": "no"}}\n\n' + DONE, "200 OK"),
        (b"", "200 OK"),
        (event("a", 1, "stop") + DONE, "503 Service Unavailable"),
    ],
)
async def test_a_stream_that_does_not_end_well_has_failed(stream: bytes, status: str) -> None:
    assert (await timeline(stream, status)).outcome is Outcome.FAILED


async def test_so_many_are_sent_at_once_until_it_is_left() -> None:
    requests = (StreamedRequest(f"r{number}", "/v1/completions", {}) for number in count())
    async with serving(event("a", 1, "stop") + DONE) as url:
        async with StreamedLoad(url, requests, at_once=2) as load:
            await until(lambda: load.num_answered >= 5)
            assert load.is_running
        sent = load.timelines(0.0)
    assert [each.rid for each in sent] == [f"r{number}" for number in range(len(sent))]
    assert sum(each.outcome is Outcome.UNFINISHED for each in sent) <= 2
