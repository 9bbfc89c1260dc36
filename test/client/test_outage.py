"""When a call is given up: uploads, downloads and polls that stall, break, and go on."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch.live_app import LiveApp
from batch.scenarios import lines
from sglang_coserve import terminal
from sglang_coserve.batch.routes.service import set_not_ready
from sglang_coserve.cli.submit import SubmitFlags, _leave
from sglang_coserve.client import BatchApi, BatchOptions, RetryPolicy
from sglang_coserve.client.calls import Outage
from sglang_coserve.errors import ServerError, ServerGoneError

GIVE_UP_S = 60
KIB = 1 << 10
POLICY = RetryPolicy(retry_for_s=100.0, first_delay_s=1.0, max_delay_s=8.0)


def outage(furthest_bytes: int = 0) -> Outage:
    return Outage(POLICY, random.Random(0), furthest_bytes)


class TestRule:
    """``Outage`` on a clock of the test's."""

    def test_time_counts_from_the_first_failure(self) -> None:
        poll = outage()
        poll.failed("down", 1000.0)
        poll.failed("down", 1099.0)
        with pytest.raises(ServerGoneError, match=r"for 100 s \(down\)"):
            poll.failed("down", 1100.0)

    def test_an_upload_goes_on_however_far_the_next_attempt_comes(self) -> None:
        """Each is 90 s under way: the server is there, though nothing new comes."""
        upload, now_s = outage(), 0.0
        for sent_bytes in (900, 800, 700, 900):
            for position in range(100, sent_bytes + 1, 100):
                upload.reached(position, now_s)
                now_s += 10.0
            now_s += upload.failed("reset", now_s)

    def test_what_always_breaks_at_the_same_byte_is_given_up(self) -> None:
        """As where a proxy has a limit: the pauses between the attempts count."""
        upload, now_s, attempts = outage(), 0.0, 0
        with pytest.raises(ServerGoneError):
            while attempts < 1000:
                upload.reached(1000, now_s)
                now_s += upload.failed("reset", now_s)
                attempts += 1
        assert 10 < attempts < 40

    @given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=30))
    def test_a_transfer_that_gets_further_is_never_given_up(self, waits_s: list[float]) -> None:
        download, now_s = outage(500), 0.0
        for position, wait_s in enumerate(waits_s, 501):
            download.reached(position, now_s)
            now_s += wait_s
            now_s += download.failed("reset", now_s)

    @given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 200.0)), max_size=60))
    def test_every_pause_ends_before_the_call_is_given_up(
        self, attempts: list[tuple[int, float]]
    ) -> None:
        call, now_s = outage(), 0.0
        for position, took_s in attempts:
            call.reached(position, now_s)
            now_s += took_s
            try:
                pause_s = call.failed("reset", now_s)
            except ServerGoneError:
                return
            assert 0 < pause_s <= POLICY.max_delay_s
            now_s += pause_s


Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
Handler = Callable[[Reader, Writer, list[bytes]], Awaitable[None]]
"""Gets the heads of all requests so far."""


def play(handle: Handler, call: Callable[[str], Awaitable[None]]) -> int:
    """Run ``call`` beside a server of raw sockets; return how many requests that has got."""
    heads: list[bytes] = []

    async def serve(reader: Reader, writer: Writer) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        try:
            await handle(reader, writer, heads)
            writer.close()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def scenario() -> None:
        # A small buffer, so that what the server reads is soon felt by the client.
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * KIB)
        async with await asyncio.start_server(serve, sock=listener, limit=16 * KIB):
            port = listener.getsockname()[1]
            async with asyncio.timeout(GIVE_UP_S):
                await call(f"http://127.0.0.1:{port}")

    asyncio.run(scenario())
    return len(heads)


async def answer(writer: Writer, body: bytes, status: str = "200 OK") -> None:
    head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def take(reader: Reader, size_bytes: int, pause_s: float = 0.0) -> None:
    while size_bytes > 0:
        size_bytes -= len(await reader.read(min(size_bytes, 16 * KIB)))
        await asyncio.sleep(pause_s)


def upload(
    source: Path, policy: RetryPolicy, stall_s: float = 30.0
) -> Callable[[str], Awaitable[None]]:
    async def call(base_url: str) -> None:
        async with BatchApi(base_url, None, policy, stall_s=stall_s) as api:
            assert await api.upload(source) == "file-1"
            assert api.last_failure is None

    return call


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(bytes(8192 * KIB))
    return path


class TestUploads:
    def test_one_that_breaks_again_and_again_goes_on(self, source: Path) -> None:
        """Each attempt takes longer than the second that may pass without a byte."""

        async def handle(reader: Reader, writer: Writer, heads: list[bytes]) -> None:
            if len(heads) <= 3:
                await take(reader, 640 * KIB, 0.03)
            else:
                await take(reader, 8192 * KIB)
                await answer(writer, b'{"id": "file-1"}')

        policy = RetryPolicy(retry_for_s=1.0, first_delay_s=0.02, max_delay_s=0.02)
        assert play(handle, upload(source, policy)) == 4

    def test_one_that_stalls_is_begun_anew(self, source: Path) -> None:
        async def handle(reader: Reader, writer: Writer, heads: list[bytes]) -> None:
            if len(heads) == 1:
                await take(reader, 128 * KIB)
                await asyncio.sleep(GIVE_UP_S)
            await take(reader, 8192 * KIB)
            await answer(writer, b'{"id": "file-1"}')

        assert play(handle, upload(source, RetryPolicy(retry_for_s=30.0), stall_s=1.0)) == 2

    @pytest.mark.parametrize("taken_kib", [0, 128, 8192])
    def test_a_server_that_hangs_is_an_error(self, source: Path, taken_kib: int) -> None:
        async def handle(reader: Reader, _writer: Writer, _heads: list[bytes]) -> None:
            await take(reader, taken_kib * KIB)
            await asyncio.sleep(GIVE_UP_S)

        policy = RetryPolicy(retry_for_s=0.3, first_delay_s=0.05)
        with pytest.raises(ServerGoneError, match=r"for 0\.3 s \((Read|Write)Timeout\)"):
            play(handle, upload(source, policy, stall_s=0.3))

    def test_a_slow_one_that_moves_is_left_alone(self, source: Path) -> None:
        """With the system's own buffers, none of its chunks would be taken for 5 s."""

        async def handle(reader: Reader, writer: Writer, _heads: list[bytes]) -> None:
            await take(reader, 1024 * KIB, 0.1)
            await take(reader, 7168 * KIB)
            await answer(writer, b'{"id": "file-1"}')

        assert play(handle, upload(source, RetryPolicy(), stall_s=4.0)) == 1

    def test_the_server_may_say_that_it_was_too_slow(self, source: Path) -> None:
        async def handle(reader: Reader, writer: Writer, heads: list[bytes]) -> None:
            await take(reader, 8192 * KIB)
            if len(heads) == 1:
                await answer(writer, b'{"error": {"message": "slow"}}', "408 Request Timeout")
            await answer(writer, b'{"id": "file-1"}')

        assert play(handle, upload(source, RetryPolicy(first_delay_s=0.02))) == 2


class TestDownloads:
    @pytest.mark.parametrize("knows_ranges", [True, False])
    def test_one_that_breaks_again_and_again_goes_on(
        self, tmp_path: Path, knows_ranges: bool
    ) -> None:
        """Without ranges, bytes that are skipped show that the server is there."""
        content = bytes(range(200)) * 50
        output = tmp_path / "out.jsonl"
        output.write_bytes(content[:6000])

        async def handle(_reader: Reader, writer: Writer, heads: list[bytes]) -> None:
            range_header = heads[-1].lower().partition(b"\r\nrange: bytes=")[2]
            start = int(range_header.partition(b"-")[0]) if knows_ranges else 0
            status = "206 Partial Content" if knows_ranges else "200 OK"
            head = f"HTTP/1.1 {status}\r\ncontent-length: {len(content) - start}\r\n\r\n"
            writer.write(head.encode())
            for begins_at in range(start, min(len(content), 6000 + 1000 * len(heads)), 500):
                writer.write(content[begins_at : begins_at + 500])
                await writer.drain()
                await asyncio.sleep(0.3 if knows_ranges else 0.1)

        async def fetch(base_url: str) -> None:
            policy = RetryPolicy(retry_for_s=1.0, first_delay_s=0.02)
            async with BatchApi(base_url, None, policy) as api:
                await api.fetch("file-1", output)

        assert play(handle, fetch) == 4
        assert output.read_bytes() == content

    @pytest.mark.parametrize("knows_ranges", [True, False])
    def test_a_file_that_is_shorter_than_what_is_here_is_another(
        self, tmp_path: Path, knows_ranges: bool
    ) -> None:
        output = tmp_path / "out.jsonl"
        output.write_bytes(bytes(5000))

        async def handle(_reader: Reader, writer: Writer, _heads: list[bytes]) -> None:
            if knows_ranges:
                status = "416 Range Not Satisfiable\r\ncontent-range: bytes */4000"
                await answer(writer, b"", status)
            else:
                await answer(writer, bytes(4000))

        async def fetch(base_url: str) -> None:
            async with BatchApi(base_url, None, RetryPolicy()) as api:
                with pytest.raises(ServerError, match=r"5,000 bytes, and .* only 4,000"):
                    await api.fetch("file-1", output)

        play(handle, fetch)
        assert output.read_bytes() == bytes(5000)


@pytest.mark.parametrize("body", [b"<html>Welcome</html>", b"[]", b'{"detail": "ok"}'])
def test_an_answer_that_is_no_list_does_not_say_that_there_is_no_batch_api(body: bytes) -> None:
    async def handle(_reader: Reader, writer: Writer, _heads: list[bytes]) -> None:
        await answer(writer, body)

    async def ask(base_url: str) -> None:
        async with BatchApi(base_url, None, RetryPolicy()) as api:
            with pytest.raises(ServerError, match="--no-batch"):
                await api.is_on()

    play(handle, ask)


@pytest.mark.parametrize(
    ("status", "body"),
    [("200 OK\r\ncontent-encoding: gzip", b"{}"), ("503 Unavailable", b"[" * 2000)],
    ids=["wrong encoding", "deep"],
)
def test_an_answer_that_cannot_be_read_is_asked_for_again(status: str, body: bytes) -> None:
    async def handle(_reader: Reader, writer: Writer, heads: list[bytes]) -> None:
        if len(heads) == 1:
            await answer(writer, body, status)
        await answer(writer, b'{"object": "list"}')

    async def ask(base_url: str) -> None:
        async with BatchApi(base_url, None, RetryPolicy(first_delay_s=0.02)) as api:
            assert await api.is_on()

    assert play(handle, ask) == 2


async def test_what_is_waited_for_is_shown_without_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "_LINE_INTERVAL_S", 0.0)
    source = tmp_path / "in.jsonl"
    source.write_bytes(lines(3))
    shown = ""

    async def is_shown(text: str) -> None:
        nonlocal shown
        while text not in shown:
            await asyncio.sleep(0.05)
            shown += capsys.readouterr().err

    async def scenario() -> None:
        policy = RetryPolicy(retry_for_s=GIVE_UP_S, max_delay_s=0.2)
        with LiveApp(None) as app:
            set_not_ready(app.app, "it is starting")
            port = app.port
            api = BatchApi(app.base_url, None, policy)
            leaving = asyncio.create_task(_leave(api, source, BatchOptions(), SubmitFlags()))
            await is_shown("waiting for the server: HTTP 503: it is starting")
        await is_shown("All connection attempts failed")
        with LiveApp(tmp_path / "data", port=port):
            assert await leaving == 0
        await api.close()

    async with asyncio.timeout(GIVE_UP_S):
        await scenario()
