"""What an overloaded server answers, stream or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import HTTPException

from sglang_coserve.srt.marks.answers import OverloadAnswer, telling_refusals

STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
LINES = (b"content-type", b"application/x-ndjson")
JSON = (b"content-type", b"application/json")
MESSAGE = "The server is overloaded"

TOKEN = {"text": "a", "meta_info": {"finish_reason": None}}
REFUSAL = {
    "text": "",
    "meta_info": {"finish_reason": {"type": "abort", "status_code": 503, "message": MESSAGE}},
}
ABORT = {"text": "", "meta_info": {"finish_reason": {"type": "abort", "status_code": 500}}}


def answered(
    *outputs: Any,
    status: int = 200,
    header: Any = STREAM,
    streams: bool = True,
    early: bool = False,
) -> list[dict[str, Any]]:
    """Send an answer with an event for each output of the engine; return what comes out."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def engine() -> AsyncIterator[Any]:
        for output in outputs:
            if isinstance(output, Exception):
                raise output
            yield output

    async def respond() -> None:
        answer = OverloadAnswer(send)
        start = {"type": "http.response.start", "status": status, "headers": [header]}
        with answer.heard():
            if streams:
                await answer(start)
            if early:
                await answer({"type": "http.response.body", "body": b"early", "more_body": True})
            try:
                async for _ in telling_refusals(engine()):
                    if streams:
                        body = {"type": "http.response.body", "body": b"event", "more_body": True}
                        await answer(body)
            except HTTPException:
                pass
            if not streams:
                await answer(start)
            await answer({"type": "http.response.body", "body": b"end"})

    asyncio.run(respond())
    return sent


def assert_refused(start: dict[str, Any], body: dict[str, Any]) -> None:
    assert (start["status"], dict(start["headers"])[b"retry-after"]) == (503, b"1")
    assert json.loads(body["body"])["error"]["message"] == MESSAGE


@pytest.mark.parametrize("header", [STREAM, LINES])
def test_a_stream_whose_request_is_refused_is_a_503(header: Any) -> None:
    assert_refused(*answered(REFUSAL, REFUSAL, header=header))


def test_a_stream_that_begins_before_the_engine_is_asked_waits_for_its_answer() -> None:
    assert_refused(*answered(REFUSAL, early=True))
    start, *bodies = answered(TOKEN, TOKEN, early=True)
    assert start["status"] == 200
    assert [body["body"] for body in bodies] == [b"early", b"event", b"event", b"end"]


@pytest.mark.parametrize("outputs", [(TOKEN, REFUSAL), (ABORT,), ([TOKEN, TOKEN],), ()])
def test_any_other_stream_passes_as_it_is(outputs: Any) -> None:
    start, *bodies = answered(*outputs)
    assert (start["status"], start["headers"]) == (200, [STREAM])
    assert [body["body"] for body in bodies] == [*[b"event"] * len(outputs), b"end"]


@pytest.mark.parametrize("status", [200, 400, 500])
def test_a_refusal_is_a_503_whatever_a_route_makes_of_it(status: int) -> None:
    refusal = HTTPException(503, MESSAGE)
    assert_refused(*answered(refusal, status=status, header=JSON, streams=False))


def test_a_503_of_a_route_stays_as_the_route_says_it() -> None:
    start, body = answered(HTTPException(503, MESSAGE), status=503, header=JSON, streams=False)
    assert (start["headers"], body["body"]) == ([JSON, (b"retry-after", b"1")], b"end")


def test_a_503_says_when_to_come_back() -> None:
    said = (b"Retry-After", b"9")
    start, *_ = answered(status=503, header=said, streams=False)
    assert start["headers"] == [said]


@pytest.mark.parametrize("status", [200, 400, 500])
def test_other_answers_pass_as_they_are(status: int) -> None:
    start, *_ = answered(HTTPException(500, "no"), status=status, header=JSON, streams=False)
    assert (start["status"], start["headers"]) == (status, [JSON])
