"""The gate alone: what it lets through, what it refuses and how much of that it reads."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.guard import bodies
from sglang_coserve.guard.bodies import RequestGateMiddleware, body_bytes
from sglang_coserve.jsonl.body_limits import BodyLimits

LIMITS = BodyLimits(max_bytes=1000, max_values=20, max_objects=5)


class Call:
    """One request through the gate, to an application that notes what it gets."""

    def __init__(
        self,
        chunks: list[bytes],
        path: str = "/generate",
        method: str = "POST",
        content_type: bytes = b"application/json",
    ) -> None:
        self.reads = 0
        self.body: bytes | None = None
        self.size_bytes = -1
        self.sent: list[dict[str, Any]] = []
        headers = [(b"content-type", content_type)]
        scope = {"type": "http", "method": method, "path": path, "headers": headers}

        async def receive() -> dict[str, Any]:
            self.reads += 1
            if self.reads > len(chunks):
                return {"type": "http.disconnect"}
            more = self.reads < len(chunks)
            return {"type": "http.request", "body": chunks[self.reads - 1], "more_body": more}

        async def send(message: Any) -> None:
            self.sent.append(dict(message))

        async def inner(scope: Any, receive: Any, _send: Any) -> None:
            self.size_bytes = body_bytes(scope)
            self.body = b""
            while (message := await receive())["type"] == "http.request":
                self.body += message["body"]

        asyncio.run(
            RequestGateMiddleware(
                inner, limits=lambda: LIMITS, free_prefixes=("/v1/files", "/v1/batches")
            )(scope, receive, send)
        )


_TEXTS = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=25)


@given(st.lists(_TEXTS, min_size=1, max_size=9), st.integers(1, 50))
def test_a_small_body_comes_through_as_it_is(texts: list[str], size: int) -> None:
    whole = "".join(texts).encode()
    chunks = [whole[start : start + size] for start in range(0, len(whole), size)] or [b""]
    call = Call(chunks)
    body = b"".join(chunks)
    assert (call.body, call.size_bytes) == (body, len(body)) or sum(map(body.count, b",[{")) > 5


HALF = '{"session_id":"\ud800"}'
"""Half a surrogate pair, not as an escape."""


@pytest.mark.parametrize(
    "path", ["/generate", "/open_session", "/v1/score", "/parse_function_call"]
)
@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    "body",
    [
        HALF.encode("utf-8", "surrogatepass"),
        HALF.encode("utf-16", "surrogatepass"),
        HALF.encode("utf-32-le", "surrogatepass"),
        '{"a":"plain"}'.encode("utf-16-le"),
        b'{"a":"\xc3',  # Ends within a character.
        b'{"a":"\x80"}',
    ],
)
def test_what_is_not_utf8_is_refused_before_anything_reads_it(
    path: str, size: int, body: bytes
) -> None:
    call = Call([body[start : start + size] for start in range(0, len(body), size)], path)
    assert call.body is None
    assert call.sent[0]["status"] == 400
    assert "UTF-8" in json.loads(call.sent[1]["body"])["error"]["message"]


def test_values_cannot_hide_from_the_limits_in_another_encoding() -> None:
    body = ('{"a":"\\"","b":[' + "1," * 100 + "1]}").encode("utf-16-le")
    assert len(json.loads(body)["b"]) == 101
    assert Call([body]).body is None


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/invocations", "/api/chat"])
@pytest.mark.parametrize(
    ("chunk", "reads"),
    [(b"x" * 300, 4), (b"[1,2,3],", 6), (b'{"a":1},', 6)],
    ids=["bytes", "values", "objects"],
)
def test_no_more_is_read_than_is_needed_to_refuse(path: str, chunk: bytes, reads: int) -> None:
    call = Call([chunk] * 1000, path)
    assert call.body is None
    assert call.reads == reads
    assert call.sent[0]["status"] == 413
    error = json.loads(call.sent[1]["body"])["error"]
    assert "more than" in error["message"] or "larger than" in error["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/open_session"), ("DELETE", "/generate"), ("POST", "/v1/audio/transcriptions")],
)
def test_no_method_and_no_content_type_leads_around_it(method: str, path: str) -> None:
    call = Call([b"x" * 300] * 10, path, method)
    assert call.body is None
    assert call.sent[0]["status"] == 413


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/audio/transcriptions"])
def test_routes_with_bounds_of_their_own_stream(path: str) -> None:
    call = Call([b"x" * 300] * 10, path, content_type=b"multipart/form-data; boundary=b")
    assert call.body == b"x" * 3000
    assert call.size_bytes == 0


def test_a_client_that_hangs_up_reaches_nobody() -> None:
    call = Call([])
    assert (call.body, call.sent) == (None, [])


@pytest.mark.parametrize(("first_bytes", "status"), [(600, 200), (700, 503)])
def test_unfinished_bodies_of_all_clients_are_bounded_together(
    first_bytes: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_MOST_HELD_BYTES", 1200)
    sent: list[int] = []

    async def both() -> None:
        second_is_done = asyncio.Event()

        def receive_of(size: int, may_end: asyncio.Event | None) -> Any:
            pieces = iter([(b'"' + b"x" * (size - 1), True), (b'"', False)])

            async def receive() -> dict[str, Any]:
                content, more = next(pieces)
                if not more and may_end is not None:
                    await may_end.wait()
                return {"type": "http.request", "body": content, "more_body": more}

            return receive

        async def inner(_scope: Any, _receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200})

        async def send(message: Any) -> None:
            sent.extend([message["status"]] if "status" in message else [])

        gate = RequestGateMiddleware(inner, limits=lambda: LIMITS)
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
        first = asyncio.create_task(gate(scope, receive_of(first_bytes, second_is_done), send))
        await asyncio.sleep(0)
        await gate(scope, receive_of(600, None), send)
        second_is_done.set()
        await first
        assert gate._held_bytes == 0

    asyncio.run(both())
    assert sent == [status, 200]


def test_a_body_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_STALLED_S", 0.01)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    asyncio.run(RequestGateMiddleware(send, limits=lambda: LIMITS)(scope, receive, send))
    assert sent[0]["status"] == 408
