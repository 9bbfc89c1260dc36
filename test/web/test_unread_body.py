"""Bodies that are answered before their end, on a real HTTP server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection
from typing import Any

import pytest

from app_thread import TIMEOUT_S
from body_server import BodyServer, serving
from sglang_coserve.web.asgi import UnreadBodyMiddleware

LONGEST_S = 0.5


@pytest.fixture(scope="module")
def server() -> Iterator[BodyServer]:
    bounded = partial(UnreadBodyMiddleware, bytes_per_s=64 << 20, longest_s=LONGEST_S)
    with serving(bounded) as running:
        yield running


def test_a_client_that_sends_all_before_it_reads_gets_its_answer(server: BodyServer) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    for _ in range(2):  # And its connection stays.
        connection.request("POST", "/refused", b"x" * (8 << 20))
        answer = connection.getresponse()
        assert answer.status == 413
        assert b"too large" in answer.read()
        connection.request("POST", "/taken", b"x" * 100)
        answer = connection.getresponse()
        assert b"100 bytes" in answer.read()
        assert answer.getheader("connection") != "close"
    connection.close()


ENDLESS = (
    b"POST /refused HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"10000000000\r\n"  # A chunk that is never complete.
)


def test_a_body_without_end_is_read_for_a_bounded_time(server: BodyServer) -> None:
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as client:
        client.sendall(ENDLESS)
        with pytest.raises(ConnectionError):  # Not the timeout: the server has closed it.
            while True:
                sent += client.send(b"x" * 60_000)
    # uvicorn alone would read on for ever.
    assert sent < 2 * LONGEST_S * (64 << 20) + (16 << 20)


def test_a_client_that_stands_still_is_answered(server: BodyServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as client:
        client.sendall(ENDLESS + b"x" * 100_000)
        answer = b""
        while piece := client.recv(65536):  # Until it is closed.
            answer += piece
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer


def test_a_client_that_waits_to_be_asked_is_answered_at_once(
    server: BodyServer,
) -> None:
    head = b"POST /refused HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as client:
        client.sendall(head)
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"0")]])
async def test_nothing_is_read_of_a_request_without_a_body(
    headers: list[tuple[bytes, bytes]],
) -> None:
    async def receive() -> Any:
        raise AssertionError("read")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/refused", "headers": headers}
    await UnreadBodyMiddleware(BodyServer().app)(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


async def test_an_answer_that_closes_the_connection_waits_for_nothing() -> None:
    async def closing(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"connection", b"close")]
        await send({"type": "http.response.start", "status": 408, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Any:
        raise AssertionError("read")

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "path": "/", "headers": [(b"content-length", b"5")]}
    await UnreadBodyMiddleware(closing)(scope, receive, send)
