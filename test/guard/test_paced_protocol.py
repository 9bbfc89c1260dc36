"""Small chunks that arrive together are parsed in turns, and nothing of them is lost."""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
from uvicorn.config import HTTP_PROTOCOLS

from app_thread import TIMEOUT_S
from body_server import BodyServer, serving
from sglang_coserve.guard.bodies import install_paced_protocol

CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
FAR_LESS_THAN_RECEIVED_BYTES = 4096
"""Of a body in chunks of one byte, uvicorn alone parses up to 43,690 in one call."""


def ask(server: BodyServer, *pieces: bytes, answers: int = 1) -> bytes:
    """Send raw bytes, and return what comes until so many answers have, or it closes."""
    with closing(socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S)) as client:
        for piece in pieces:
            client.sendall(piece)
        return read_answers(client, answers)


def read_answers(client: socket.socket, count: int) -> bytes:
    answer = b""
    while answer.count(b" bytes") + answer.count(b"Invalid") < count:
        received = client.recv(1 << 16)
        if not received:
            break
        answer += received
    return answer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BodyServer]:
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])
    install_paced_protocol()
    with serving() as started:
        yield started


def in_chunks(body: bytes, sizes: list[int]) -> bytes:
    chunks: list[bytes] = []
    at = 0
    while at < len(body):
        size = sizes[len(chunks) % len(sizes)]
        part = body[at : at + size]
        chunks.append(b"%x\r\n%s\r\n" % (len(part), part))
        at += size
    return b"".join(chunks)


def test_chunks_of_one_byte_are_parsed_in_turns(server: BodyServer) -> None:
    body = bytes(range(256)) * 512
    answer = ask(server, CHUNKED + in_chunks(body, [1]) + END)
    assert b"131072 bytes" in answer
    assert b"".join(server.parts) == body
    assert max(map(len, server.parts)) < FAR_LESS_THAN_RECEIVED_BYTES


@pytest.mark.parametrize("seed", range(5))
def test_bodies_arrive_whole_however_they_are_cut(server: BodyServer, seed: int) -> None:
    """Also those of requests that are sent without waiting for an answer."""
    rng = random.Random(seed)
    bodies = [rng.randbytes(rng.choice([1, 5_000, 40_000])) for _ in range(4)]
    requests = b"".join(
        CHUNKED + in_chunks(body, [rng.choice([1, 3, 70, 9_000]) for _ in range(5)]) + END
        for body in bodies
    )
    cuts = sorted(rng.sample(range(len(requests)), 5))
    pieces = [requests[a:b] for a, b in zip([0, *cuts], [*cuts, len(requests)], strict=True)]
    answer = ask(server, *pieces, answers=len(bodies))
    told = [int(size) for size in re.findall(rb"(\d+) bytes", answer)]
    assert told == [len(body) for body in bodies]
    assert b"".join(server.parts) == b"".join(bodies)


def test_a_malformed_chunk_is_refused_and_what_follows_is_left(server: BodyServer) -> None:
    answer = ask(server, CHUNKED + in_chunks(b"x" * 9_000, [1]) + b"zz\r\n" + b"1\r\nx\r\n" * 9_000)
    assert b" 400 " in answer
    assert sum(map(len, server.parts)) <= 9_000
    assert b"3 bytes" in ask(server, CHUNKED + in_chunks(b"abc", [1]) + END)


def test_a_client_that_leaves_in_the_middle_is_forgotten(server: BodyServer) -> None:
    with closing(socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S)) as client:
        client.sendall(CHUNKED + in_chunks(b"x" * 20_000, [1]))
    assert b"3 bytes" in ask(server, CHUNKED + in_chunks(b"abc", [1]) + END)
