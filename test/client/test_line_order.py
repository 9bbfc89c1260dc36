"""Lines with a common beginning are sent together, and nothing else changes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from client.batch_files import line, results_by_line, write_lines
from client.fault_server import FaultServer
from client.test_batch_run import options, submit
from sglang_coserve.client import AsyncCoserveClient, AsyncJob, JobState
from sglang_coserve.lines.line_run import LineRun
from sglang_coserve.lines.line_source import LineSource, PrefixOrder

GROUPS, MEMBERS = 60, 10
COMMON = "You are a lighthouse keeper who answers in one sentence. " * 5
IN_ORDER = options(concurrency=1)
"""One line at a time, so that the server sees them in the order in which they are sent."""


def shuffled(seed: int = 1) -> list[str]:
    prompts = [f"{group:03d} {COMMON} {n}" for group in range(GROUPS) for n in range(MEMBERS)]
    random.Random(seed).shuffle(prompts)
    return [line(f"id-{number}", prompt) for number, prompt in enumerate(prompts, 1)]


def changes(server: FaultServer) -> int:
    groups = [body["prompt"][:3] for body in server.bodies]
    return sum(one != other for one, other in pairwise(groups))


@pytest.fixture
def found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is there, or was not found, before the first line is asked for, however slow the
    machine is."""
    serve = LineRun.serve

    async def serve_in_order(
        run: LineRun, lines: LineSource, beside: Coroutine[Any, Any, None]
    ) -> None:
        await beside
        await serve(run, lines, asyncio.sleep(0))

    monkeypatch.setattr(LineRun, "serve", serve_in_order)


@pytest.mark.usefixtures("found_at_once")
def test_lines_with_a_common_beginning_are_sent_together(server: FaultServer, source: Path) -> None:
    write_lines(source, shuffled())
    status = submit(server.base_url, source, client_options=IN_ORDER)
    assert (status.state, status.ok) == (JobState.COMPLETED, GROUPS * MEMBERS)
    assert status.done_bytes == status.total_bytes
    assert status.ordered_share is None
    assert changes(server) <= GROUPS
    assert not source.with_name("out.coserve-order").exists()
    assert len(results_by_line(source.with_name("out.jsonl"))) == GROUPS * MEMBERS


def test_a_file_that_the_server_has_as_a_whole_is_not_ordered(
    server: FaultServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(PrefixOrder, "find")
    write_lines(source, shuffled()[:8])
    assert submit(server.base_url, source, client_options=options(concurrency=8)).ok == 8


@pytest.mark.usefixtures("found_at_once")
def test_every_line_gets_the_record_that_it_gets_in_the_files_order(
    server: FaultServer, tmp_path: Path
) -> None:
    lines = shuffled()
    lines[100:100] = [
        "not json",
        "",
        lines[3],
        line("stream", stream=True),
        "x" * 20_000,
        lines[-1],
    ]
    lines.append(lines[0])
    told = []
    for name, concurrency in (("ordered", 1), ("plain", 1000)):
        (tmp_path / name).mkdir()
        source = write_lines(tmp_path / name / "in.jsonl", lines)
        submit(server.base_url, source, client_options=options(concurrency=concurrency))
        results = results_by_line(source.with_name("out.jsonl"))
        told.append(
            {n: each.error.code if each.error else each.text for n, each in results.items()}
        )
    ordered, plain = told
    assert ordered == plain
    # The copy of the last line comes first, so that one is the duplicate.
    assert ordered[606] == "duplicate_custom_id"
    assert list(ordered.values()).count("duplicate_custom_id") == 3


@pytest.mark.usefixtures("found_at_once")
def test_a_run_that_was_stopped_goes_on_in_the_order(server: FaultServer, source: Path) -> None:
    write_lines(source, shuffled())

    async def cancel_after_200(job: AsyncJob) -> None:
        while job.status.ok < 200:
            await asyncio.sleep(0.001)
        job.cancel()

    first = submit(server.base_url, source, client_options=IN_ORDER, meanwhile=cancel_after_200)
    assert first.state is JobState.CANCELLED
    status = submit(server.base_url, source, client_options=IN_ORDER)
    assert (status.ok, status.resumed) == (GROUPS * MEMBERS, first.ok)
    assert status.done_bytes == status.total_bytes
    assert changes(server) <= 2 * GROUPS
    assert len(results_by_line(source.with_name("out.jsonl"))) == GROUPS * MEMBERS


def finds_an_order(process: psutil.Process) -> bool:
    try:
        return "prefix_order" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # It has ended, if only its parent has yet to notice.
        return False


async def test_the_process_ends_with_the_job(
    server: FaultServer, source: Path, tmp_path: Path
) -> None:
    write_lines(source, shuffled())
    async with AsyncCoserveClient(server.base_url, options=IN_ORDER) as client:
        job = await client.submit_jsonl(source, tmp_path / "out.jsonl")
        while job.status.ordered_share is None and job.is_running:
            await asyncio.sleep(0)
        assert 0 <= (job.status.ordered_share or 0) <= 1
        job.cancel()
        await job.ended()
    assert not [
        child for child in psutil.Process().children(recursive=True) if finds_an_order(child)
    ]


@pytest.mark.usefixtures("found_at_once")
def test_without_an_order_lines_are_sent_as_they_come(
    server: FaultServer,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("sglang_coserve.lines.line_source._MODULE", "no.such.module")
    write_lines(source, shuffled())
    assert submit(server.base_url, source, client_options=IN_ORDER).ok == GROUPS * MEMBERS
    numbers = [body["prompt"] for body in server.bodies]
    assert "served in the order of the file" in caplog.text
    assert len(numbers) == len(set(numbers))
    assert changes(server) > GROUPS * MEMBERS * 0.9
