"""When a server to which lines are sent counts as gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sglang_coserve.client.line_server import LineServer
from sglang_coserve.client.options import ClientOptions
from sglang_coserve.errors import ServerGoneError
from sglang_coserve.lines.backend import FailureKind, LineResult

ANSWER = LineResult(200, "", {"choices": []})
UNREACHABLE = LineResult.unserved("unreachable", "refused", FailureKind.UNREACHABLE)
LOST = LineResult.unserved("connection_lost", "connection lost", FailureKind.LOST)
BUSY = LineResult(503, "", {"message": "busy"}, True, FailureKind.UNAVAILABLE)
FAILED = LineResult(500, "", {"message": "oops"}, True, FailureKind.FAILED)

Attempt = tuple[int, LineResult, float, float]
"""A line, what came of it, and when the attempt began and ended."""

GONE: dict[str, list[Attempt]] = {
    "a line that always fails": [(1, UNREACHABLE, 0, 0), (1, BUSY, 150, 150), (1, LOST, 299, 300)],
    "after an answer": [(1, ANSWER, 0, 9), (1, BUSY, 10, 10), (2, LOST, 9, 100), (1, BUSY, 9, 310)],
}
THERE: dict[str, list[Attempt]] = {
    "no attempt has ended": [],
    "the first failure comes after hours": [(1, UNREACHABLE, 0, 10_000)],
    "others are answered": [(1, BUSY, 0, 0), (2, ANSWER, 0, 200), (1, BUSY, 0, 400)],
    "others fail by themselves": [(1, BUSY, 0, 0), (2, FAILED, 0, 200), (1, BUSY, 0, 400)],
    "each line fails once": [(1, BUSY, 0, 0), (2, LOST, 250, 299), (3, LOST, 290, 400)],
    "lines are held for long": [(1, LOST, 0, 900), (1, LOST, 901, 1801), (1, LOST, 1802, 2702)],
}


async def watched(attempts: list[Attempt]) -> str | None:
    """Return why lines are not served after these attempts."""
    server = LineServer("http://a:1", None, ClientOptions(), asyncio.Semaphore(1), Path())
    for attempt in attempts:
        server._note(*attempt)
    server.raise_if_given_up()
    return server.stalled_by


@pytest.mark.parametrize("attempts", GONE.values(), ids=GONE)
async def test_a_server_that_is_gone(attempts: list[Attempt]) -> None:
    with pytest.raises(ServerGoneError, match="from http://a:1 for 300 s"):
        await watched(attempts)


@pytest.mark.parametrize("attempts", THERE.values(), ids=THERE)
async def test_a_server_that_is_there(attempts: list[Attempt]) -> None:
    await watched(attempts)


async def test_why_lines_are_retried_is_told_until_one_is_answered() -> None:
    assert await watched([(1, BUSY, 0, 0)]) == "HTTP 503: busy"
    assert await watched([(1, BUSY, 0, 0), (2, ANSWER, 0, 1)]) is None
