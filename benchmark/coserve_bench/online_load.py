"""Sends the online requests of a run, from a process of its own.

There nothing else delays what it sends and times: neither the offline load nor its answers.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from common.failures import RunFailedError
from common.own_process import OwnProcess
from sglang_coserve.metrics import RequestTimeline
from sglang_coserve.streamed_load import StreamedLoad, StreamedRequest, replayed
from sglang_coserve.workload import TraceRequest

__all__ = ["OnlineLoad", "OnlineResult"]

_PREPARE_TIMEOUT_S: Final = 120.0
_WARM_UP_PROMPT_TOKENS: Final = 32
_WARM_UP_OUTPUT_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class OnlineResult:
    """What became of the online requests of one run, times in seconds since the window's start."""

    timelines: tuple[RequestTimeline, ...]
    began_s: float
    """The window's start, at first the first arrival, on the clock of ``time.perf_counter``."""

    def since(self, start_s: float) -> OnlineResult:
        """Return the requests that arrive from then on, with times counted from there."""
        later = (timeline for timeline in self.timelines if timeline.arrival_s >= start_s)
        return OnlineResult(
            tuple(_moved(timeline, -start_s) for timeline in later), self.began_s + start_s
        )


class OnlineLoad:
    """The process, kept from run to run, started when it is needed.

    For each run ``load`` and then ``go``. ``time.perf_counter`` is one clock for
    all processes of a machine, so its times can be compared with ours.
    """

    def __init__(self) -> None:
        self._process: OwnProcess | None = None

    async def load(
        self,
        base_url: str,
        requests: Sequence[TraceRequest],
        *,
        vocab_size: int,
        seed: int,
        body: Mapping[str, Any],
    ) -> None:
        """Prepare the next run; ``body`` is added to each request's.

        Raises:
            RunFailedError: the process ended or gave no answer in time.
        """
        if self._process is None:
            self._process = await asyncio.to_thread(OwnProcess, _Sender)
        arguments = (base_url, requests, vocab_size, seed, dict(body))
        await self._call("prepare", *arguments, timeout_s=_PREPARE_TIMEOUT_S)

    async def go(self, timeout_s: float) -> OnlineResult:
        """Send what was loaded and wait for every answer.

        Raises:
            RunFailedError: the process ended, or the answers took longer than ``timeout_s``.
        """
        result: OnlineResult = await self._call("send", timeout_s=timeout_s)
        return result

    async def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.end)

    async def _call(self, name: str, *arguments: Any, timeout_s: float) -> Any:
        process = self._process
        assert process is not None, "nothing was loaded"

        def call() -> Any:
            try:
                return process.call(name, *arguments, timeout_s=timeout_s)
            except SystemExit as error:
                raise RunFailedError(f"the online load: {error}") from None

        try:
            return await asyncio.to_thread(call)
        except RunFailedError:
            await self.close()
            raise


class _Sender:
    """Lives in the process."""

    def __init__(self) -> None:
        self._base_url = ""
        self._requests: tuple[TraceRequest, ...] = ()
        self._streamed: list[StreamedRequest] = []

    def close(self) -> None:
        """Nothing is left between two calls."""

    def prepare(
        self,
        base_url: str,
        requests: Sequence[TraceRequest],
        vocab_size: int,
        seed: int,
        fields: Mapping[str, Any],
    ) -> None:
        """Make the bodies of a run, and one to warm the server up with, which comes first."""
        warm_up = TraceRequest(
            len(requests) + 1, 0.0, _WARM_UP_PROMPT_TOKENS, _WARM_UP_OUTPUT_TOKENS
        )
        self._base_url, self._requests = base_url, (warm_up, *requests)
        self._streamed = list(
            replayed(self._requests, vocab_size=vocab_size, seed=seed, fields=fields)
        )
        gc.collect()
        gc.freeze()

    def send(self) -> OnlineResult:
        """Send them, and wait for every answer."""
        return asyncio.run(self._send())

    async def _send(self) -> OnlineResult:
        sent = iter(self._streamed)
        async with StreamedLoad(self._base_url, sent, arrivals_s=(0.0,)) as warm_up:
            await warm_up.finished()
        arrivals_s = (request.arrival_s for request in self._requests[1:])
        async with StreamedLoad(self._base_url, sent, arrivals_s=arrivals_s) as load:
            await load.finished()
        return OnlineResult(tuple(load.timelines()), load.began_s)


def _moved(timeline: RequestTimeline, by_s: float) -> RequestTimeline:
    return replace(
        timeline,
        arrival_s=timeline.arrival_s + by_s,
        token_times_s=tuple(time_s + by_s for time_s in timeline.token_times_s),
    )
