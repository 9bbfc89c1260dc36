"""What an overloaded server answers, stream or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sglang_coserve.srt.marks.answers import OverloadAnswer

STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
MESSAGE = "The server is overloaded"


def answered(*bodies: bytes, status: int = 200, headers: Any = (STREAM,)) -> list[dict[str, Any]]:
    """Send an answer in these pieces; return what comes out."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def respond() -> None:
        answer = OverloadAnswer(send)
        start = {"type": "http.response.start", "status": status, "headers": list(headers)}
        await answer(start)
        for body in bodies:
            await answer({"type": "http.response.body", "body": body, "more_body": True})
        await answer({"type": "http.response.body", "body": b""})

    asyncio.run(respond())
    return sent


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


OPENAI = event({"error": {"object": "error", "message": MESSAGE, "code": 503}})


@pytest.mark.parametrize(
    "first",
    [
        event({"choices": [{"text": "503"}]}),
        event({"error": {"message": "another", "code": 500, "param": 503}}),
        event({"error": 503}),
        event([503]),
        b"data: 503 is no object\n\n",
        b": a comment of 503\n\n",
        b'event: error\ndata: {"error": {"type": "api_error", "message": "overloaded_error"}}\n\n',
        b"event: error\ndata: overloaded_error\n\n",
        b"",
    ],
)
def test_any_other_stream_passes_as_it_is(first: bytes) -> None:
    start, *bodies = answered(first, OPENAI)
    assert (start["status"], start["headers"]) == (200, [STREAM])
    assert [body["body"] for body in bodies] == [first, OPENAI, b""]


@pytest.mark.parametrize(("said", "expected"), [([], b"1"), ([(b"Retry-After", b"9")], b"9")])
def test_a_503_says_when_to_come_back(said: Any, expected: bytes) -> None:
    start, *_ = answered(b"{}", status=503, headers=said)
    assert [value for name, value in start["headers"] if name.lower() == b"retry-after"] == [
        expected
    ]


def test_other_answers_pass_at_once() -> None:
    for status in (200, 400, 500):
        start, *_ = answered(b"{}", status=status, headers=[(b"content-type", b"text/plain")])
        assert (start["status"], len(start["headers"])) == (status, 1)
