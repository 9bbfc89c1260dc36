"""The gate alone: what it lets through, what it refuses and how much of that it reads."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@given(st.lists(st.binary(max_size=100), min_size=1, max_size=9))
def test_a_small_body_comes_through_as_it_is(chunks: list[bytes]) -> None:
    call = Call(chunks)
    body = b"".join(chunks)
    assert (call.body, call.size_bytes) == (body, len(body)) or sum(map(body.count, b",[{")) > 5


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
