"""Clients who stop in the middle, over real connections: they hold nothing for ever."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import openai
import pytest

from batch.live_app import LiveApp
from batch.route_calls import upload
from batch.scenarios import lines
from waiting import eventually

TIMEOUT_S = 30
MIB = 1 << 20


@pytest.fixture
def app(tmp_path: Path) -> Iterator[LiveApp]:
    with LiveApp(
        tmp_path / "data",
        transfer_idle_s=1.0,
        min_transfer_bytes_per_s=MIB,
        max_transfers=40,
    ) as app:
        yield app


def held_upload(app: LiveApp, key: str, content: bytes = b"") -> socket.socket:
    """A connection on which an upload has begun, and goes no further than ``content``."""
    connection = socket.create_connection(("127.0.0.1", app.port), TIMEOUT_S)
    form = (
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n' + content
    )
    connection.sendall(
        b"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + key.encode() + b"\r\n"
        b"content-type: multipart/form-data; boundary=x\r\ncontent-length: 9999999\r\n\r\n" + form
    )
    return connection


def test_400_held_uploads_block_nobody_and_end(app: LiveApp) -> None:
    assert app.service is not None
    service = app.service
    with ExitStack() as stack:
        held = [
            stack.enter_context(closing(held_upload(app, f"key-{n % 8}", b"{" * n)))
            for n in range(400)
        ]
        with app.client("another") as other:
            eventually(lambda: service.uploads.count > 0)
            assert service.uploads.count < 40
            assert upload(other, lines(3))
        refused = b" uploads of this key are under way"
        statuses: Counter[int] = Counter()
        for connection in held:
            # A refused one is told at once; the server would still take the rest of its body.
            answer = connection.recv(1 << 16)
            status = int(answer.split(b" ", 2)[1])
            statuses[status] += 1
            if status == 408:
                assert b"connection: close" in answer
                while connection.recv(1 << 16):
                    pass
            while status == 429 and refused not in answer:
                more = connection.recv(1 << 16)
                assert more
                answer += more
        assert set(statuses) == {408, 429}
        assert statuses[408] >= 32
    eventually(lambda: service.uploads.count == 0)
    with app.client("key-0") as client:
        assert upload(client, lines(3))
    assert not list((app.data / "in_doubt").iterdir())


def test_an_upload_by_drops_is_given_up(tmp_path: Path) -> None:
    """Never idle for long, but slower than anybody's line."""
    with (
        LiveApp(tmp_path / "data", transfer_idle_s=0.5, min_transfer_bytes_per_s=1000) as app,
        closing(held_upload(app, "key")) as connection,
    ):
        connection.settimeout(0.05)
        head = b""
        while not head:
            connection.sendall(b"{")
            try:
                head = connection.recv(1 << 16)
            except TimeoutError:
                continue
        assert b" 408 " in head


def test_a_response_whose_body_stands_still_is_given_up(app: LiveApp) -> None:
    with closing(socket.create_connection(("127.0.0.1", app.port), TIMEOUT_S)) as connection:
        connection.sendall(
            b"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n{"
        )
        answer = b""
        while more := connection.recv(1 << 16):
            answer += more
    assert b" 408 " in answer.partition(b"\r\n")[0] and b"connection: close" in answer


def test_downloads_that_nobody_reads_end(app: LiveApp) -> None:
    assert app.service is not None
    service = app.service
    with app.client("key") as client:
        file_id = upload(client, bytes(16 * MIB))
        request = (
            f"GET /v1/files/{file_id}/content HTTP/1.1\r\nhost: x\r\n"
            "authorization: Bearer key\r\n\r\n"
        ).encode()
        with ExitStack() as stack:
            for _ in range(20):
                connection = socket.socket()
                # The less the system takes, the sooner the server has to wait.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(("127.0.0.1", app.port))
                stack.enter_context(closing(connection))
                connection.sendall(request)
            eventually(lambda: service.downloads.count == 20)
            with pytest.raises(openai.RateLimitError, match="20 downloads of this key"):
                client.files.content(file_id)
            # By the content's length a client would notice that some of it is missing.
            eventually(lambda: service.downloads.count == 0)
            assert len(client.files.content(file_id).content) == 16 * MIB
