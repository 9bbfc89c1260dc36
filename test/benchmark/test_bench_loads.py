"""What is sent, and what is read back from the load generators."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bench_cases import online
from hypothesis import given
from hypothesis import strategies as st

from common.failures import RunFailedError
from coserve_bench.offline_lines import OfflineSpec, read_requests, write_sample
from coserve_bench.online_load import OnlineLoad, OnlineResult
from coserve_bench.online_requests import OnlineSpec, burst, online_requests
from coserve_bench.run_record import OfflineRecord
from sglang_coserve.errors import InputFileError, WorkloadError
from sglang_coserve.metrics import Outcome
from sglang_coserve.workload import TraceRequest, sample_path

CONTEXT = 4096


@given(
    rate_per_s=st.floats(0.5, 50),
    cv=st.floats(0.2, 3),
    seed=st.integers(0, 100),
)
def test_arrivals_have_the_rate_exactly_and_lengths_their_range(
    rate_per_s: float, cv: float, seed: int
) -> None:
    spec = OnlineSpec(cv=cv, prompt_tokens=100, output_tokens=10, range_ratio=0.5)
    requests = online_requests(spec, rate_per_s, 20.0, seed, CONTEXT)
    times_s = [request.arrival_s for request in requests]
    assert len(requests) == round(20 * rate_per_s)
    assert times_s[0] == 0 and times_s == sorted(times_s)
    assert times_s[-1] / (len(times_s) - 1) == pytest.approx(1 / rate_per_s)
    assert all(50 <= request.prompt_tokens <= 100 for request in requests)
    assert all(5 <= request.output_tokens <= 10 for request in requests)
    assert requests == online_requests(spec, rate_per_s, 20.0, seed, CONTEXT)


def test_another_load_has_the_same_shape() -> None:
    slow = online_requests(OnlineSpec(), 1.0, 40.0, 7, CONTEXT)
    fast = online_requests(OnlineSpec(), 4.0, 10.0, 7, CONTEXT)
    assert [r.arrival_s for r in slow] == pytest.approx([4 * r.arrival_s for r in fast])


def test_a_trace_gives_lengths_and_shape() -> None:
    spec = OnlineSpec(trace=sample_path("online"))
    requests = online_requests(spec, 2.0, 30.0, 0, CONTEXT)
    assert len(requests) == 60
    gaps_s = [b.arrival_s - a.arrival_s for a, b in pairwise(requests)]
    assert max(gaps_s) > 3 * min(gaps_s)
    with pytest.raises(WorkloadError, match="longer trace"):
        online_requests(spec, 1000.0, 30.0, 0, CONTEXT)


def test_what_arrives_while_warming_up_is_not_counted() -> None:
    timelines = tuple(online(0.5, 0.1, arrival_s) for arrival_s in (0.0, 9.9, 10.0, 12.0))
    window = OnlineResult(timelines, 100.0).since(10.0)
    assert [timeline.arrival_s for timeline in window.timelines] == [0.0, 2.0]
    assert [timeline.token_times_s[0] for timeline in window.timelines] == [0.5, 2.5]
    assert window.began_s == 110.0


def test_a_burst_arrives_at_once_with_the_same_lengths() -> None:
    together = burst(OnlineSpec(), 5, 3, CONTEXT)
    spread = online_requests(OnlineSpec(), 1.0, 5.0, 3, CONTEXT)
    assert {request.arrival_s for request in together} == {0.0}
    assert [r.prompt_tokens for r in together] == [r.prompt_tokens for r in spread]


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

    async def runs() -> list[OnlineResult]:
        load = OnlineLoad()

        async def run(timeout_s: float) -> OnlineResult:
            prepared = {"vocab_size": 100, "seed": 5, "body": {"priority": 100}}
            await load.load(server.base_url, requests, **prepared)
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
    for result in results:
        first, second = result.timelines
        assert (first.prompt_tokens, second.prompt_tokens) == (7, 9)
        assert (len(first.token_times_s), len(second.token_times_s)) == (3, 2)
        assert {first.outcome, second.outcome} == {Outcome.FINISHED}
        assert second.arrival_s >= 0.05 and second.token_times_s[0] > second.arrival_s
    # Each run sends its own request first, which is not counted; the silent one sent no other.
    lengths = [len(body["input_ids"]) for body in server.bodies]
    assert lengths == [32, 7, 9, 32, 7, 9, 32, 32, 7, 9]
    assert {body["priority"] for body in server.bodies} == {100}
    assert server.bodies[:3] == server.bodies[3:6]


def test_offline_tokens_count_within_the_window_only() -> None:
    before = online(ttft_s=1, gap_s=1, arrival_s=-5)
    straddling = online(ttft_s=3, gap_s=1, arrival_s=-2)
    late = online(ttft_s=1, gap_s=1, arrival_s=8.5)
    offline = OfflineRecord.of([before, straddling, late], window_s=10.0)
    # Of the first nothing, of the second all, of the third its prompt and one token.
    assert offline.throughput.total_tokens_per_s == pytest.approx((10 + 3 + 10 + 1) / 10)
    assert sum(offline.tokens_by_s) == 24 and offline.tokens_by_s[0] == 11
    assert (offline.sent, offline.finished, offline.failed) == (3, 3, 0)


def test_the_sample_has_its_lengths_and_no_common_prefix(tmp_path: Path) -> None:
    path = tmp_path / "offline.jsonl"
    spec = OfflineSpec(prompt_tokens=20, output_tokens=4, lines=30)
    write_sample(path, spec, vocab_size=500, seed=1)
    requests = list(read_requests(path, {"priority": 0}))
    bodies = [request.body for request in requests]
    assert len(requests) == len({tuple(body["prompt"][:3]) for body in bodies}) == 30
    assert {len(body["prompt"]) for body in bodies} == {20}
    assert {(b["max_tokens"], b["stream"], b["priority"]) for b in bodies} == {(4, True, 0)}
    assert {body["service_tier"] for body in bodies} == {"flex"}


def test_a_bad_offline_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "offline.jsonl"
    path.write_text(json.dumps({"custom_id": "a"}) + "\n")
    with pytest.raises(InputFileError, match="line 1"):
        next(read_requests(path, {}))
