"""Online requests, sent by a process of their own.

There nothing else delays what it sends and times: neither another load nor its answers.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

from common.failures import RunFailedError
from common.own_process import OwnProcess
from sglang_coserve.metrics import RequestTimeline
from sglang_coserve.streamed_load import StreamedLoad, StreamedRequest, replayed
from sglang_coserve.workload import TraceRequest, fit_to_context, poisson_arrivals, synthesize

__all__ = ["OnlineLoad", "online_requests"]

_PREPARE_TIMEOUT_S: Final = 120.0
_WARM_UP_PROMPT_TOKENS: Final = 32
_WARM_UP_OUTPUT_TOKENS: Final = 8
_PROMPT_TOKENS: Final = (128, 256)
_OUTPUT_TOKENS: Final = (32, 64)


def online_requests(
    rate_per_s: float, seconds: float, seed: int, max_context_tokens: int
) -> list[TraceRequest]:
    """Return ``rate_per_s · seconds`` Poisson arrivals, with uniform lengths. The seed decides."""
    count = max(2, round(rate_per_s * seconds))
    made = synthesize(poisson_arrivals(rate_per_s, seed), _lengths(seed))
    return fit_to_context(islice(made, count), max_context_tokens)[0]


class OnlineLoad:
    """The process, kept from run to run, started when it is needed.

    For each run ``load`` and then ``go``.
    """

    def __init__(self) -> None:
        self._process: OwnProcess | None = None

    async def load(
        self, base_url: str, requests: Sequence[TraceRequest], *, vocab_size: int, seed: int
    ) -> None:
        """Prepare the next run.

        Raises:
            RunFailedError: the process ended or gave no answer in time.
        """
        if self._process is None:
            self._process = await asyncio.to_thread(OwnProcess, _Sender)
        arguments = (base_url, requests, vocab_size, seed)
        await self._call("prepare", *arguments, timeout_s=_PREPARE_TIMEOUT_S)

    async def go(self, timeout_s: float) -> list[RequestTimeline]:
        """Send what was loaded and wait for every answer; times count from the first arrival.

        Raises:
            RunFailedError: the process ended, or the answers took longer than ``timeout_s``.
        """
        timelines: list[RequestTimeline] = await self._call("send", timeout_s=timeout_s)
        return timelines

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
        self, base_url: str, requests: Sequence[TraceRequest], vocab_size: int, seed: int
    ) -> None:
        """Make the bodies of a run, and one to warm the server up with, which comes first."""
        warm_up = TraceRequest(
            len(requests) + 1, 0.0, _WARM_UP_PROMPT_TOKENS, _WARM_UP_OUTPUT_TOKENS
        )
        self._base_url, self._requests = base_url, (warm_up, *requests)
        self._streamed = list(replayed(self._requests, vocab_size=vocab_size, seed=seed))
        gc.collect()
        gc.freeze()

    def send(self) -> list[RequestTimeline]:
        """Send them, and wait for every answer."""
        return asyncio.run(self._send())

    async def _send(self) -> list[RequestTimeline]:
        sent = iter(self._streamed)
        async with StreamedLoad(self._base_url, sent, arrivals_s=(0.0,)) as warm_up:
            await warm_up.finished()
        arrivals_s = (request.arrival_s for request in self._requests[1:])
        async with StreamedLoad(self._base_url, sent, arrivals_s=arrivals_s) as load:
            await load.finished()
        return load.timelines()


def _lengths(seed: int) -> Iterator[tuple[int, int]]:
    rng = random.Random(seed + 1)
    while True:
        yield rng.randint(*_PROMPT_TOKENS), rng.randint(*_OUTPUT_TOKENS)
