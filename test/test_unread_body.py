"""Bodies that are answered before their end, on a real HTTP server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
import uvicorn

from sglang_coserve.asgi import UnreadBodyMiddleware, send_error
from sglang_coserve.local_server import free_port

TIMEOUT_S = 30.0
LONGEST_S = 0.5


class Server:
    """Refuses ``/refused`` at once, and takes everything else."""

    def __init__(self) -> None:
        self.port = free_port()
        app = UnreadBodyMiddleware(_app, bytes_per_s=64 << 20, longest_s=LONGEST_S)
        config = uvicorn.Config(app, port=self.port, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> Server:
        self._thread.start()
        end_s = time.monotonic() + TIMEOUT_S
        while not self._server.started:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


async def _app(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/refused":
        await send_error(send, 413, "too large")
        return
    size_bytes, more = 0, True
    while more:
        message = await receive()
        size_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
    await send_error(send, 400, f"{size_bytes} bytes")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def test_a_client_that_sends_all_before_it_reads_gets_its_answer(server: Server) -> None:
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


def test_a_body_without_end_is_read_for_a_bounded_time(server: Server) -> None:
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as client:
        client.sendall(ENDLESS)
        with pytest.raises(ConnectionError):  # Not the timeout: the server has closed it.
            while True:
                sent += client.send(b"x" * 60_000)
    # uvicorn alone would read on for ever.
    assert sent < 2 * LONGEST_S * (64 << 20) + (16 << 20)


def test_a_client_that_stands_still_is_answered(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as client:
        client.sendall(ENDLESS + b"x" * 100_000)
        answer = b""
        while piece := client.recv(65536):  # Until it is closed.
            answer += piece
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer


def test_a_client_that_waits_to_be_asked_for_its_body_is_answered_at_once(server: Server) -> None:
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
    await UnreadBodyMiddleware(_app)(scope, receive, send)
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
