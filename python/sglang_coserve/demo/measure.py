"""Measures one window: the trace, with or without the offline file, on a running server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sglang_coserve.demo.loads import StreamedLoad, StreamedRequest, replayed
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
    offline: Iterable[StreamedRequest] | None,
    say: Callable[[float, str], None],
) -> SystemResult:
    """Send both loads, and return their results when the window is over.

    Args:
        system: What is measured.
        window: The workload.
        base_url: Its server.
        offline: The offline load, which does not end; None: there is none.
        say: Called now and then with the seconds that are over and the progress of both.
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

    async with AsyncExitStack() as stack:
        beside = None
        if offline is not None:
            beside = StreamedLoad(base_url, offline, at_once=_CONCURRENCY)
            await stack.enter_async_context(beside)
            say(0.0, "offline load begins")
            with suppress(TimeoutError):
                async with asyncio.timeout(window.seconds):
                    while not beside.num_answered:
                        await asyncio.sleep(_POLL_S)
        async with online:
            while (beside or online.is_running) and elapsed_s() < window.seconds:
                say_progress(f", offline {beside.num_answered}" if beside else "")
                await asyncio.sleep(_POLL_S)
            offline_s = elapsed_s()
            await stack.aclose()
            await online.finished()
    since_s = online.began_s
    return SystemResult(
        system.name,
        LABELS[system.name],
        online.timelines(since_s),
        None if beside is None else beside.timelines(since_s),
        offline_s,
    )
