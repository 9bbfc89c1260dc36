"""Measures one window: the trace, with or without the offline file, on a running server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sglang_coserve.client import AsyncCoserveClient, ClientOptions
from sglang_coserve.demo.loads import StreamedLoad, replayed
from sglang_coserve.demo.report import SystemResult
from sglang_coserve.demo.servers import LABELS, System
from sglang_coserve.workload.trace import TraceRequest

_CONCURRENCY: Final = 64
_DRAIN_S: Final = 20.0
_POLL_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Window:
    """The workload, which is the same for every system."""

    requests: Sequence[TraceRequest]
    seconds: float
    vocab_size: int
    offline: Path
    """Lines, which are repeated as long as it lasts."""

    lines_in_one: int
    """How many of them are joined for a longer prompt."""


async def measure(
    system: System,
    window: Window,
    base_url: str,
    offline: tuple[Path, Path] | None,
    say: Callable[[float, str], None],
) -> SystemResult:
    """Send both loads, and return their results when the window is over.

    Args:
        system: What is measured.
        window: The workload.
        base_url: Its server.
        offline: The file of offline lines, and where its results go; None: no offline load.
        say: Called now and then with the seconds that are over and the progress of both.

    Raises:
        CoserveError: the file or the server is at fault.
    """
    online = StreamedLoad(
        base_url,
        replayed(window.requests, vocab_size=window.vocab_size, fields=system.online_body),
        arrivals_s=[request.arrival_s for request in window.requests],
        drain_s=_DRAIN_S,
    )

    def elapsed_s() -> float:
        return time.perf_counter() - online.began_s

    def say_progress(more: str = "") -> None:
        say(elapsed_s(), f"online {online.num_answered}/{len(window.requests)}{more}")

    if offline is None:
        async with online:
            while online.is_running and elapsed_s() < window.seconds:
                say_progress()
                await asyncio.sleep(_POLL_S)
            await online.finished()
        return SystemResult(system.name, LABELS[system.name], online.timelines(), None)
    options = ClientOptions(concurrency=_CONCURRENCY)
    async with AsyncCoserveClient(base_url, options=options) as client:
        job = await client.submit_jsonl(*offline)
        # Reading the file and sending the first lines keeps this process busy for a third of a
        # second, which would count as latency of the first online requests.
        say(0.0, "offline load begins")
        with suppress(TimeoutError):
            async with asyncio.timeout(window.seconds):
                while job.is_running and not job.status.ok + job.status.failed:
                    await asyncio.sleep(_POLL_S)
        finished_at: list[tuple[float, int]] = []
        async with online:
            while elapsed_s() < window.seconds:
                status = job.status
                tokens = status.prompt_tokens + status.completion_tokens
                if not finished_at or tokens > finished_at[-1][1]:
                    finished_at.append((elapsed_s(), tokens))
                say_progress(f", offline {status.ok} ok, {status.failed} failed")
                if not online.is_running and not job.is_running:
                    break
                await asyncio.sleep(_POLL_S)
            is_complete = not job.is_running
            job.cancel()
            await job.ended()
            if is_complete:
                await job.wait()  # Raises what ended it early, if anything did.
            await online.finished()
    timelines = online.timelines()
    return SystemResult(system.name, LABELS[system.name], timelines, job.status, finished_at)
