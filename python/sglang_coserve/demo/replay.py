"""Replays an online trace against a server, open loop, and times every token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import httpx

from sglang_coserve.metrics import Outcome, RequestTimeline
from sglang_coserve.workload import TraceRequest, prompt_token_ids

__all__ = ["replay"]

_SEED = 0


async def replay(
    base_url: str,
    requests: Sequence[TraceRequest],
    *,
    vocab_size: int,
    drain_s: float,
    on_finished: Callable[[RequestTimeline], None] = lambda _: None,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> list[RequestTimeline]:
    """Send each request at its arrival time, answered or not, and stream its tokens.

    Prompts are random tokens of the traced length; outputs have exactly the traced
    length.  ``drain_s`` after the last arrival, requests still running are given up
    and count as unfinished.  Times are seconds since the call.  ``fields`` are added to
    each body.
    """
    start = time.perf_counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits) as client:
        tasks = []
        for request in requests:
            await asyncio.sleep(start + request.arrival_s - time.perf_counter())
            stream = _Stream(client, request, vocab_size, start, on_finished, fields)
            tasks.append(asyncio.create_task(stream.run()))
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=drain_s)
            for task in late:
                task.cancel()
        return list(await asyncio.gather(*tasks))


class _Stream:
    """One streamed request."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        request: TraceRequest,
        vocab_size: int,
        start: float,
        on_finished: Callable[[RequestTimeline], None],
        fields: Mapping[str, Any],
    ) -> None:
        self._client = client
        self._request = request
        self._vocab_size = vocab_size
        self._start = start
        self._on_finished = on_finished
        self._fields = fields
        self._token_times_s: list[float] = []

    async def run(self) -> RequestTimeline:
        arrival_s = time.perf_counter() - self._start
        try:
            outcome = await self._receive()
        except asyncio.CancelledError:
            outcome = Outcome.UNFINISHED
        except httpx.TransportError:
            outcome = Outcome.FAILED
        timeline = RequestTimeline(
            rid=f"online-{self._request.index}",
            arrival_s=arrival_s,
            token_times_s=tuple(self._token_times_s),
            prompt_tokens=self._request.prompt_tokens,
            outcome=outcome,
        )
        self._on_finished(timeline)
        return timeline

    async def _receive(self) -> Outcome:
        async with self._client.stream("POST", "/generate", json=self._body()) as response:
            if response.status_code != 200:
                return Outcome.FAILED
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._count(json.loads(line.removeprefix("data: ")))
        is_whole = len(self._token_times_s) == self._request.output_tokens
        return Outcome.FINISHED if is_whole else Outcome.FAILED

    def _count(self, event: dict[str, Any]) -> None:
        now_s = time.perf_counter() - self._start
        completed = event.get("meta_info", {}).get("completion_tokens", 0)
        self._token_times_s += [now_s] * (completed - len(self._token_times_s))

    def _body(self) -> dict[str, Any]:
        ids = prompt_token_ids(self._request, vocab_size=self._vocab_size, seed=_SEED)
        return {
            "input_ids": ids.tolist(),
            "sampling_params": {
                "max_new_tokens": self._request.output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
            },
            "stream": True,
            **self._fields,
        }
