"""Sends requests, so many at a time or at given times, and times every token of their answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import httpx

from sglang_coserve.errors import ServerError
from sglang_coserve.metrics import Outcome, RequestTimeline
from sglang_coserve.workload import TraceRequest, prompt_token_ids

__all__ = ["StreamedLoad", "StreamedRequest", "replayed"]

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class StreamedRequest:
    """One request; its body asks for a stream with the number of tokens so far."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


def replayed(
    trace: Iterable[TraceRequest],
    *,
    vocab_size: int,
    seed: int = 0,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[StreamedRequest]:
    """Yield requests with random prompts and outputs of exactly the traced lengths.

    ``fields`` are added to each body. When the requests come is the load's ``arrivals_s``.
    """
    for request in trace:
        body = {
            "input_ids": prompt_token_ids(request, vocab_size=vocab_size, seed=seed).tolist(),
            "sampling_params": {
                "max_new_tokens": request.output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
            },
            "stream": True,
            **fields,
        }
        yield StreamedRequest(f"online-{request.index}", "/generate", body)


class StreamedLoad:
    """One load of one run: ``async with`` starts it and, on leaving, breaks it off.

    With ``arrivals_s`` None it is a closed loop: ``concurrency`` requests are at
    the server at any time. Else they are sent at these times, earlier ones answered
    or not. A failed request is counted, not repeated.
    """

    def __init__(
        self,
        base_url: str,
        requests: Iterator[StreamedRequest],
        *,
        concurrency: int = 1,
        arrivals_s: Iterable[float] | None = None,
        drain_s: float | None = None,
    ) -> None:
        """``drain_s`` after the last arrival, answers still missing are given up; None: never."""
        self._client = httpx.AsyncClient(
            base_url=base_url,
            timeout=httpx.Timeout(None, connect=30.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )
        self._requests = requests
        self._concurrency = concurrency
        self._arrivals_s = arrivals_s
        self._drain_s = drain_s
        self._streams: list[_Stream] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.has_run_out = False
        """True once the file had no further line for a free place."""

        self.began_s = 0.0
        """When it was entered, on the clock of ``time.perf_counter``; arrivals count from there."""

    async def __aenter__(self) -> Self:
        self.began_s = time.perf_counter()
        if self._arrivals_s is None:
            self._tasks = [asyncio.create_task(self._work()) for _ in range(self._concurrency)]
        else:
            self._tasks = [asyncio.create_task(self._arrive(self._arrivals_s))]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    @property
    def is_running(self) -> bool:
        """True until everything is sent, and answered or given up."""
        return not all(task.done() for task in self._tasks)

    @property
    def num_answered(self) -> int:
        """Requests that have ended. O(requests)."""
        return sum(stream.outcome is not Outcome.UNFINISHED for stream in self._streams)

    async def until_steady(self, seconds: float, timeout_s: float) -> None:
        """Wait for ``seconds``; a closed loop also for its first request to finish.

        Raises:
            ServerError: none did within ``timeout_s``, or the load stopped by itself.
        """
        began_s = time.perf_counter()
        while True:
            self.check()
            waited_s = time.perf_counter() - began_s
            has_finished = any(s.outcome is Outcome.FINISHED for s in self._streams)
            if waited_s >= seconds and (has_finished or self._arrivals_s is not None):
                return
            if waited_s > timeout_s:
                raise ServerError(f"no request finished within {timeout_s:.0f} s")
            await asyncio.sleep(_POLL_S)

    async def finished(self) -> None:
        """Wait until everything is sent, and answered or given up."""
        await asyncio.gather(*self._tasks)

    def check(self) -> None:
        """Raise what stopped the load, if anything did.

        Raises:
            InputFileError: a line of the file cannot be used.
            ServerError: every request so far failed.
        """
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
        failures = [s.failure for s in self._streams if s.outcome is Outcome.FAILED]
        if len(failures) >= self._concurrency and len(failures) == len(self._streams):
            raise ServerError(f"every request fails: {failures[0]}")

    def timelines(self, began_s: float | None = None) -> list[RequestTimeline]:
        """Return every request sent, timed in seconds since ``began_s``, by default the load's."""
        began_s = self.began_s if began_s is None else began_s
        return [stream.timeline(began_s) for stream in self._streams]

    async def _work(self) -> None:
        while request := self._next():
            await self._send(request)

    async def _arrive(self, arrivals_s: Iterable[float]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as draining, asyncio.TaskGroup() as tasks:
                for arrival_s in arrivals_s:
                    await asyncio.sleep(self.began_s + arrival_s - time.perf_counter())
                    request = self._next()
                    if request is None:
                        return
                    tasks.create_task(self._send(request))
                if self._drain_s is not None:
                    draining.reschedule(asyncio.get_running_loop().time() + self._drain_s)

    def _next(self) -> StreamedRequest | None:
        request = next(self._requests, None)
        if request is None:
            self.has_run_out = True
        return request

    async def _send(self, request: StreamedRequest) -> None:
        stream = _Stream(request)
        self._streams.append(stream)
        await stream.receive(self._client)


class _Stream:
    """One streamed request."""

    def __init__(self, request: StreamedRequest) -> None:
        self._request = request
        self._sent_s = time.perf_counter()
        self._token_times_s: list[float] = []
        self._prompt_tokens = 0
        self.outcome = Outcome.UNFINISHED
        self.failure = ""

    async def receive(self, client: httpx.AsyncClient) -> None:
        try:
            async with client.stream(
                "POST", self._request.url, json=self._request.body
            ) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    self._fail(f"HTTP {response.status_code}: {text[:200]}")
                    return
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self._fail(str(error) or type(error).__name__)
        if self.outcome is Outcome.UNFINISHED:
            self._fail("the stream ended before the answer did")

    def timeline(self, began_s: float) -> RequestTimeline:
        return RequestTimeline(
            rid=self._request.custom_id,
            arrival_s=self._sent_s - began_s,
            token_times_s=tuple(time_s - began_s for time_s in self._token_times_s),
            prompt_tokens=self._prompt_tokens,
            outcome=self.outcome,
        )

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self._fail(str(event["error"])[:200])
            return
        # The latter on SGLang's own route.
        if usage := event.get("usage") or event.get("meta_info"):
            self._prompt_tokens = usage["prompt_tokens"]
            fresh = usage["completion_tokens"] - len(self._token_times_s)
            self._token_times_s += [time.perf_counter()] * fresh
        for choice in (*event.get("choices", ()), event.get("meta_info", {})):
            reason = choice.get("finish_reason")
            if reason == "abort" or (isinstance(reason, dict) and reason["type"] == "abort"):
                self._fail("the server aborted the request")
            elif reason is not None:
                self.outcome = Outcome.FINISHED

    def _fail(self, reason: str) -> None:
        self.outcome = Outcome.FAILED
        self.failure = reason
