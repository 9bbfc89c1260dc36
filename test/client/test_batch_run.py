"""A whole batch that the client keeps, with everything that goes wrong on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from batch.scenarios import line
from client.batch_files import results_by_line, write_lines
from client.fault_server import FaultServer
from sglang_coserve.client import (
    AsyncCoserveClient,
    AsyncJob,
    ClientOptions,
    JobState,
    JobStatus,
    RetryPolicy,
)
from sglang_coserve.errors import InputFileError, ServerError, ServerGoneError
from waiting import GIVE_UP_S, until

QUICK = RetryPolicy(retry_for_s=30.0, max_attempts=3, first_delay_s=0.01, max_delay_s=0.05)


def options(
    concurrency: int = 8,
    retry_policy: RetryPolicy = QUICK,
    request_timeout_s: float | None = None,
    max_line_bytes: int = 10_000,
    max_inflight_bytes: int = 1 << 20,
) -> ClientOptions:
    return ClientOptions(
        concurrency=concurrency,
        retry_policy=retry_policy,
        request_timeout_s=request_timeout_s,
        max_line_bytes=max_line_bytes,
        max_inflight_bytes=max_inflight_bytes,
    )


def submit(
    base_url: str,
    source: Path,
    *,
    client_options: ClientOptions | None = None,
    meanwhile: Callable[[AsyncJob], Awaitable[None]] | None = None,
) -> JobStatus:
    """Run ``source`` to its end, with the output beside it."""

    async def run() -> JobStatus:
        async with (
            asyncio.timeout(GIVE_UP_S),
            AsyncCoserveClient(base_url, options=client_options or options()) as client,
        ):
            job = await client.submit_jsonl(source, source.with_name("out.jsonl"))
            if meanwhile:
                await meanwhile(job)
            return await job.wait()

    return asyncio.run(run())


def test_every_line_is_answered_once(server: FaultServer, source: Path, output: Path) -> None:
    write_lines(source, [line(f"id-{n}") for n in range(1, 201)])
    status = submit(server.base_url, source)
    assert (status.state, status.ok, status.failed) == (JobState.COMPLETED, 200, 0)
    assert (status.prompt_tokens, status.completion_tokens) == (600, 400)
    assert status.total == 200
    results = results_by_line(output)
    assert {n: result.text for n, result in results.items()} == {
        n: f"id-{n}" for n in range(1, 201)
    }
    assert all(result.custom_id == f"id-{n}" for n, result in results.items())
    assert results[1].response
    assert results[1].response.request_id == "rid-id-1"
    assert set(server.prompts().values()) == {1}
    assert {body["service_tier"] for body in server.bodies} == {"flex"}


def test_the_server_never_has_more_lines_than_allowed(server: FaultServer, source: Path) -> None:
    write_lines(source, [line(f"id-{n}", faults=["crowd 7"]) for n in range(60)])
    submit(server.base_url, source, client_options=options(concurrency=7))
    assert server.most_active == 7


def test_the_server_never_has_more_bytes_than_allowed(server: FaultServer, source: Path) -> None:
    big = [line(f"id-{n}", prompt=f"{n:4000}", faults=["crowd 3"]) for n in range(20)]
    write_lines(source, big)
    status = submit(server.base_url, source, client_options=options(max_inflight_bytes=13_000))
    assert status.ok == 20
    assert server.most_active == 3


def test_lines_that_cannot_be_served_become_records_and_the_rest_goes_on(
    server: FaultServer, source: Path, output: Path
) -> None:
    lines = [
        line("good-1"),
        "",
        line("too-long-prompt", faults=["400"]),
        line("large", prompt="x" * 20_000),
        line("html", faults=["html"]),
        line("lost-model", faults=["404"]),
        line("stream", stream=True),
        line("good-2"),
    ]
    source.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    status = submit(server.base_url, source)
    assert (status.ok, status.failed) == (2, 5)
    results = results_by_line(output)
    codes = {n: each.error.code for n, each in results.items() if each.error}
    assert codes == {
        3: "http_400",
        4: "http_413",
        5: "invalid_response",
        6: "http_404",
        7: "http_400",
    }
    assert {n: each.custom_id for n, each in results.items()}[4] == "large"
    refused = results[3]
    assert refused.response
    assert refused.response.status_code == 400
    assert refused.error
    assert refused.error.message == "fault 400"
    assert len(server.bodies) == 5


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b"not json", "line 3: not valid JSON"),
        (b"\xff\xfe", "line 3: not valid UTF-8"),
        (b'{"custom_id": "x", "method": "POST", "url": "/v1/completions"}', "line 3: body is miss"),
        (line("good-1").encode(), "line 3: an earlier line has the same custom_id"),
        (line("x").replace("/v1/", "http://elsewhere/v1/").encode(), "line 3: url must be"),
    ],
)
def test_a_malformed_line_is_told_before_anything_is_served_and_can_be_mended(
    server: FaultServer, source: Path, output: Path, bad: bytes, says: str
) -> None:
    good = line("good-1").encode() + b"\n" + line("good-2").encode() + b"\n"
    source.write_bytes(good + bad)
    with pytest.raises(InputFileError, match=f"in.jsonl is refused:\n *{says}"):
        submit(server.base_url, source)
    assert sorted(path.name for path in source.parent.iterdir()) == ["in.jsonl", "out.jsonl"]
    source.write_bytes(good)
    assert submit(server.base_url, source).ok == 2
    assert len(server.bodies) == 2


@pytest.mark.parametrize("content", [b"", b"\n  \n"])
def test_an_empty_file_is_refused(server: FaultServer, source: Path, content: bytes) -> None:
    source.write_bytes(content)
    with pytest.raises(InputFileError, match="the file has no requests"):
        submit(server.base_url, source)


def test_bodies_are_sent_as_they_were_meant_in_the_offline_class(
    server: FaultServer, source: Path
) -> None:
    """Unless they choose their class."""
    strange = {"text": "naïve 日本 \U0001f600 \u2028", "x": 1.5e-300, "n": 2**70, "deep": [[{}]]}
    chosen: list[dict[str, Any]] = [{"service_tier": "default"}, {"coserve_class": "online"}]
    bodies = [*chosen, {"service_tier": "flex"}, {"service_tier": None}, strange]
    write_lines(source, [line(str(n), **body) for n, body in enumerate(bodies)])
    assert submit(server.base_url, source).ok == len(bodies)
    flex = {"service_tier": "flex"}
    meant = [*chosen, flex, flex, strange | flex]
    assert {body.pop("prompt"): body for body in server.bodies} == {
        str(n): body for n, body in enumerate(meant)
    }


def test_passing_faults_are_retried(server: FaultServer, source: Path, output: Path) -> None:
    faults = ["503", "429 0", "502", "504", "500", "abort", "drop", "half"]
    write_lines(source, [line(f"id-{fault}", faults=[fault, fault]) for fault in faults])
    status = submit(server.base_url, source)
    assert (status.ok, status.failed) == (len(faults), 0)
    assert set(server.prompts().values()) == {3}
    assert len(results_by_line(output)) == len(faults)


def test_the_pause_a_server_asks_for_is_kept(server: FaultServer, source: Path) -> None:
    write_lines(source, [line("a", faults_forever="503 3600")])
    impatient = RetryPolicy(retry_for_s=0.5, first_delay_s=0.001, max_delay_s=0.001)
    with pytest.raises(ServerGoneError, match="HTTP 503: fault 503"):
        submit(server.base_url, source, client_options=options(retry_policy=impatient))
    # Without the pause there would be hundreds: the second attempt is the last moment's.
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        *(("500", "http_500"), ("abort", "aborted")),
        *(("drop", "connection_lost"), ("hang", "request_timeout")),
    ],
)
def test_a_line_that_fails_while_others_are_served_is_given_up(
    server: FaultServer, source: Path, output: Path, fault: str, code: str
) -> None:
    others = [line(f"id-{n}", faults=["slow 0.05"]) for n in range(100)]
    write_lines(source, [line("poison", faults_forever=fault), *others])
    status = submit(
        server.base_url, source, client_options=options(concurrency=2, request_timeout_s=1.0)
    )
    assert (status.ok, status.failed) == (100, 1)
    result = results_by_line(output)[1]
    assert result.error
    assert result.error.code == code
    attempts = server.prompts()["poison"]
    # What others may have failed of counts only once one of them was served meanwhile.
    assert attempts == 3 if fault in ("500", "abort") else attempts >= 3


def test_a_server_that_dies_and_comes_back_costs_nothing_but_time(
    server: FaultServer, source: Path, output: Path
) -> None:
    def die_at_the_50th(count: int) -> None:
        if count == 50:
            server.die_here()
            server.come_back_after(0.5)

    server.on_request = die_at_the_50th
    write_lines(source, [line(f"id-{n}", faults=["slow 0.005"]) for n in range(150)])
    status = submit(server.base_url, source)
    assert (status.ok, status.failed, status.trouble) == (150, 0, None)
    assert len(results_by_line(output)) == 150


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_stops_the_run_without_records(
    server: FaultServer, source: Path, output: Path, status: int
) -> None:
    write_lines(source, [line(f"id-{n}") for n in range(20)])
    server.refuses_keys_with = status
    with pytest.raises(ServerError, match="refuses the API key"):
        submit(server.base_url, source)
    assert results_by_line(output) == {}
    server.refuses_keys_with = None
    assert submit(server.base_url, source).ok == 20


@pytest.mark.parametrize("others", [["slow 0.3"], []], ids=["first", "later"])
def test_a_line_for_which_the_key_is_no_good_is_an_error_record(
    server: FaultServer, source: Path, output: Path, others: list[str]
) -> None:
    """Also where its answer is the first: the others show that the key is good."""
    lines = [line(f"id-{n}", faults=others) for n in range(7)]
    write_lines(source, [*lines, line("not yours", faults_forever="403")])
    status = submit(server.base_url, source)
    assert (status.ok, status.failed) == (7, 1)
    error = results_by_line(output)[8].error
    assert error and error.code == "http_403"


def test_closing_the_client_stops_its_jobs_and_frees_the_output(
    server: FaultServer, source: Path, output: Path
) -> None:
    write_lines(source, [line("a", faults=["hang"])])

    async def run() -> AsyncJob:
        async with AsyncCoserveClient(server.base_url) as client:
            job = await client.submit_jsonl(source, output)
            await until(lambda: server.bodies)
        return job

    job = asyncio.run(run())
    assert job.status.state is JobState.CANCELLED
    # The first attempt of the line hung; this is its second.
    assert submit(server.base_url, source).ok == 1


async def test_two_jobs_share_a_client(server: FaultServer, tmp_path: Path) -> None:
    sources = [
        write_lines(tmp_path / f"{name}.jsonl", [line(f"{name}-{n}") for n in range(50)])
        for name in "ab"
    ]
    async with (
        asyncio.timeout(GIVE_UP_S),
        AsyncCoserveClient(server.base_url, options=options()) as client,
    ):
        jobs = [await client.submit_jsonl(each, each.with_suffix(".out.jsonl")) for each in sources]
        assert [(await job.wait()).ok for job in jobs] == [50, 50]
    assert server.most_active <= 8
