"""Requests whose end two readers would see in different places, on a real HTTP server."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from app_thread import TIMEOUT_S
from body_server import BodyServer, serving
from sglang_coserve.web.asgi import FramingMiddleware

CHUNKED = b"5\r\nhello\r\n0\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[BodyServer]:
    with serving(FramingMiddleware) as running:
        yield running


def answered(server: BodyServer, head: bytes, body: bytes, version: bytes = b"1.1") -> bytes:
    """All that comes back, until the server closes the connection."""
    start = b"POST /taken HTTP/" + version + b"\r\nHost: x\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as client:
        client.sendall(start + head + b"\r\n\r\n" + body)
        found = b""
        while piece := client.recv(1 << 16):
            found += piece
        return found


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked", CHUNKED),
        (b"transfer-encoding: Chunked\r\ncontent-length: 15", CHUNKED),
        (b"Content-Length: 5\r\nContent-Length: 6", b"hello"),
        (b"Transfer-Encoding: gzip, chunked", CHUNKED),
        (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", CHUNKED),
        (b"Content-Length: +5", b"hello"),
    ],
)
def test_who_says_two_things_is_refused_and_cut_off(
    server: BodyServer, head: bytes, body: bytes
) -> None:
    found = answered(server, head, body)
    # HTTP/1.1 parsers refuse some of them by themselves.
    assert found.split(b" ", 2)[1] in (b"400", b"501")
    assert b"connection: close" in found.lower()
    assert found.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"Content-Length: 5", b"hello"),
        (b"Transfer-Encoding: chunked", CHUNKED),
    ],
)
def test_who_says_one_thing_is_served(server: BodyServer, head: bytes, body: bytes) -> None:
    found = answered(server, head + b"\r\nConnection: close", body)
    assert b"5 bytes" in found


def test_http_1_0_has_no_codings(server: BodyServer) -> None:
    found = answered(server, b"Transfer-Encoding: chunked", CHUNKED, b"1.0")
    assert found.split(b" ", 2)[1] == b"400"
    assert b"5 bytes" in answered(server, b"Content-Length: 5", b"hello", b"1.0")
