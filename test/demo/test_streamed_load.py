"""What becomes of streams, by what a server sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import pytest

from sglang_coserve.demo.loads import StreamedLoad, StreamedRequest
from sglang_coserve.metrics import Outcome, RequestTimeline
from waiting import until
from web_server import Call, web_server

GIVE_UP_S = 30


@contextmanager
def serving(stream: bytes, status: int = 200, *, step_bytes: int = 1) -> Iterator[str]:
    """A server that answers every request with ``stream``, so many bytes at a time."""

    def answer(call: Call) -> None:
        call.send_response(status)
        call.send_header("content-type", "text/event-stream")
        call.end_headers()
        with suppress(ConnectionError):
            for index in range(0, len(stream), step_bytes):
                call.wfile.write(stream[index : index + step_bytes])

    with web_server(answer) as server:
        yield server.url


async def timeline(stream: bytes, status: int = 200, *, step_bytes: int = 1) -> RequestTimeline:
    request = StreamedRequest("a", "/v1/completions", {})
    with serving(stream, status, step_bytes=step_bytes) as url:
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
        (event("a", 1), 200),
        (event("a", 1) + b"data: {cut\n\n", 200),
        (event("a", 1, "abort") + DONE, 200),
        (b'data: {"error": {"message": "no"}}\n\n' + DONE, 200),
        (b"", 200),
        (event("a", 1, "stop") + DONE, 503),
    ],
)
async def test_a_stream_that_does_not_end_well_has_failed(stream: bytes, status: int) -> None:
    assert (await timeline(stream, status)).outcome is Outcome.FAILED


async def test_events_that_come_together_have_no_gap() -> None:
    stream = event("a", 1) + event("b", 2) + event("c", 3, "stop") + DONE
    together = await timeline(stream, step_bytes=len(stream))
    assert (together.output_tokens, together.itls_s) == (3, ())


async def test_so_many_are_sent_at_once_until_it_is_left() -> None:
    requests = (StreamedRequest(f"r{number}", "/v1/completions", {}) for number in count())
    with serving(event("a", 1, "stop") + DONE) as url:
        async with StreamedLoad(url, requests, at_once=2) as load:
            await until(lambda: load.num_answered >= 5)
            assert load.is_running
        sent = load.timelines(0.0)
    assert [each.rid for each in sent] == [f"r{number}" for number in range(len(sent))]
    assert sum(each.outcome is Outcome.UNFINISHED for each in sent) <= 2
