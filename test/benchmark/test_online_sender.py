"""The online requests beside an upload: who they are, and that another process sends them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from batch_bench.online_load import OnlineLoad, online_requests
from common.failures import RunFailedError
from sglang_coserve.metrics import Outcome, RequestTimeline
from sglang_coserve.workload import TraceRequest


def test_requests_come_in_order_with_lengths_in_their_range_and_the_same_for_a_seed() -> None:
    requests = online_requests(4.0, 100.0, 7, 4096)
    times_s = [request.arrival_s for request in requests]
    assert len(requests) == 400 and times_s == sorted(times_s)
    assert times_s[-1] == pytest.approx(100, rel=0.2)
    assert all(128 <= request.prompt_tokens <= 256 for request in requests)
    assert all(32 <= request.output_tokens <= 64 for request in requests)
    assert requests == online_requests(4.0, 100.0, 7, 4096)


class Server(ThreadingHTTPServer):
    """Streams answers on SGLang's own route; answers nothing while ``is_silent``."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.is_silent = False
        self.ends = threading.Event()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        if self.server.is_silent:
            self.server.ends.wait(60)
            return
        self.send_response(200)
        self.end_headers()
        outputs = body["sampling_params"]["max_new_tokens"]
        for number in range(1, outputs + 1):
            meta = {
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": number,
                "finish_reason": {"type": "length"} if number == outputs else None,
            }
            self.wfile.write(f"data: {json.dumps({'meta_info': meta})}\n\n".encode())

    def log_message(self, *_arguments: object) -> None:
        """Be quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.ends.set()
        running.shutdown()
        thread.join()


def test_online_requests_are_sent_by_another_process_until_one_run_takes_too_long(
    server: Server,
) -> None:
    requests = [TraceRequest(0, 0.0, 7, 3), TraceRequest(1, 0.05, 9, 2)]

    async def runs() -> list[list[RequestTimeline]]:
        load = OnlineLoad()

        async def run(timeout_s: float) -> list[RequestTimeline]:
            await load.load(server.base_url, requests, vocab_size=100, seed=5)
            return await load.go(timeout_s)

        try:
            results = [await run(60.0), await run(60.0)]
            server.is_silent = True
            with pytest.raises(RunFailedError, match="no answer in 1 s"):
                await run(1.0)
            server.is_silent = False
            return [*results, await run(60.0)]
        finally:
            await load.close()

    results = asyncio.run(runs())
    for first, second in results:
        assert (first.prompt_tokens, second.prompt_tokens) == (7, 9)
        assert (len(first.token_times_s), len(second.token_times_s)) == (3, 2)
        assert {first.outcome, second.outcome} == {Outcome.FINISHED}
        assert second.arrival_s >= 0.05 and second.token_times_s[0] > second.arrival_s
    # Each run sends its own request first, which is not counted; the silent one sent no other.
    lengths = [len(body["input_ids"]) for body in server.bodies]
    assert lengths == [32, 7, 9, 32, 7, 9, 32, 32, 7, 9]
    assert server.bodies[:3] == server.bodies[3:6]
