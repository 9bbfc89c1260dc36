"""The loads of the demo: a trace, and the lines of a file again and again, as streams."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final, Self

import httpx2
import orjson

from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import InputFileError, unreadable
from sglang_coserve.jsonl.request_line import BadLineError, RequestLine, parse_request_line
from sglang_coserve.metrics import Outcome, RequestTimeline
from sglang_coserve.workload.shape import prompt_token_ids, scale_rate
from sglang_coserve.workload.trace import TraceRequest

_DONE: Final = "[DONE]"
"""The last event of a stream."""

_STREAMED: Final = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


@dataclass(frozen=True, slots=True)
class StreamedRequest:
    """One request; its body asks for a stream with the number of tokens so far."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


def repeated(
    source: Path, fields: Mapping[str, Any], *, lines_in_one: int = 1
) -> Iterator[StreamedRequest]:
    """Return the requests of a file of lines, again and again without end.

    Each copy's prompts begin differently, so that none is served from another one's
    cache; within a copy they share what they shared.

    Args:
        source: JSONL in OpenAI's batch format.
        fields: Added to each body.
        lines_in_one: How many lines to join for a longer prompt; above 1 all must be chats.

    Raises:
        InputFileError: ``source`` cannot be read, has no line, or one that is no request.
    """
    try:
        texts = [text for text in source.read_bytes().split(b"\n") if text.strip()]
        lines = [parse_request_line(text, None) for text in texts]
    except OSError as error:
        raise InputFileError(unreadable(source, error)) from error
    except BadLineError as error:
        raise InputFileError(f"{source}: {error}") from error
    if not lines:
        raise InputFileError(f"{source}: there is no request in it")
    joined = []
    for start in range(0, len(lines), lines_in_one):
        first, *others = lines[start : start + lines_in_one]
        for other in others:
            first.body["messages"] += other.body["messages"]
        first.body.update(fields, **_STREAMED)
        joined.append(first)
    return (_copy(line, number) for number in count() for line in joined)


def _copy(line: RequestLine, number: int) -> StreamedRequest:
    body = line.body
    if number:
        body, start = deepcopy(body), f"Copy {number}. "
        match body:
            case {"prompt": str(prompt)}:
                body["prompt"] = start + prompt
            case {"messages": [{"content": str(text)} as first, *_]}:
                first["content"] = start + text
            case {"messages": [{"content": [*parts]} as first, *_]}:
                first["content"] = [{"type": "text", "text": start}, *parts]
    return StreamedRequest(line.custom_id, line.url, body)


def replayed(
    trace: Iterable[TraceRequest], *, vocab_size: int, fields: Mapping[str, Any]
) -> Iterator[StreamedRequest]:
    """Yield requests with random prompts and outputs of exactly the traced lengths.

    ``fields`` are added to each body. When the requests come is the load's ``arrivals_s``.
    """
    for request in trace:
        body = {
            "input_ids": prompt_token_ids(request, vocab_size=vocab_size, seed=0).tolist(),
            "sampling_params": {
                "max_new_tokens": request.output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
            },
            "stream": True,
            **fields,
        }
        yield StreamedRequest(f"online-{request.index}", "/generate", body)


_RATE: Final = 3.0
"""As many requests and output tokens as two CPU cores send, serve and time at a GPU's pace."""

_ONLINE_SHARE: Final = 0.2
"""Of the device's time, what online prompts take on average. In a burst of the bundled trace it is
twice as much, and the rest is there for offline work."""


@dataclass(frozen=True, slots=True)
class LoadScale:
    """How many times as many requests come per second, and how many times as long prompts are.

    Outputs stay as they are: what streams them is the host.
    """

    rate: float = 1.0
    prompts: float = 1.0

    @classmethod
    def for_device(
        cls, requests: Sequence[TraceRequest], latency_model: LatencyModel, chunk_tokens: int
    ) -> Self:
        """Return the scale at which a trace's prompts take their share of a device's time.

        Args:
            requests: The whole trace, which must not be empty.
            latency_model: Of the device.
            chunk_tokens: Prompt tokens that it computes in one step.
        """
        step_s = latency_model.predict(StepStats.of([(chunk_tokens, 0)], []))
        wanted_per_s = _ONLINE_SHARE * chunk_tokens / step_s
        seconds = (requests[-1].arrival_s - requests[0].arrival_s) / _RATE
        found_per_s = sum(request.prompt_tokens for request in requests) / seconds
        return cls(_RATE, wanted_per_s / found_per_s)

    def applied(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """Return a trace at this scale, of which a request without a prompt stays one."""
        return (
            replace(request, prompt_tokens=math.ceil(request.prompt_tokens * self.prompts))
            for request in scale_rate(requests, self.rate)
        )

    @property
    def lines_in_one(self) -> int:
        """How many offline lines to join for prompts as many times as long."""
        return max(1, round(self.prompts))

    def __str__(self) -> str:
        rate = "" if self.rate == 1 else f", {self.rate:g} × as many per second"
        return rate if self.prompts == 1 else f"{rate}, prompts {self.prompts:.1f} × as long"


class StreamedLoad:
    """One load of one run: ``async with`` starts it and, on leaving, breaks it off.

    Requests are sent at given times, earlier ones answered or not, or so many ``at_once``. A failed
    request is counted, not repeated.
    """

    def __init__(
        self,
        base_url: str,
        requests: Iterable[StreamedRequest],
        *,
        arrivals_s: Iterable[float] = (),
        drain_s: float = 0.0,
        at_once: int = 0,
    ) -> None:
        """``drain_s`` after the last arrival, answers still missing are given up."""
        self._client = httpx2.AsyncClient(
            base_url=base_url,
            timeout=httpx2.Timeout(None, connect=30.0),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )
        self._requests = iter(requests)
        self._arrivals_s = arrivals_s
        self._drain_s = drain_s
        self._at_once = at_once
        self._streams: list[_Stream] = []
        self._task: asyncio.Task[None] | None = None
        self.began_s = 0.0
        """When it was entered, on the clock of ``time.perf_counter``; arrivals count from there."""

    async def __aenter__(self) -> Self:
        self.began_s = time.perf_counter()
        self._task = asyncio.create_task(self._send_all())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._client.aclose()

    @property
    def is_running(self) -> bool:
        """True until everything is sent, and answered or given up."""
        return self._task is not None and not self._task.done()

    @property
    def num_answered(self) -> int:
        """Requests that have ended. O(requests)."""
        return sum(stream.outcome is not Outcome.UNFINISHED for stream in self._streams)

    async def finished(self) -> None:
        """Wait until everything is sent, and answered or given up."""
        assert self._task is not None
        await self._task

    def timelines(self, since_s: float) -> list[RequestTimeline]:
        """Return every request sent, timed in seconds since then, on the clock of ``began_s``."""
        return [stream.timeline(since_s) for stream in self._streams]

    async def _send_all(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as draining, asyncio.TaskGroup() as tasks:
                for _ in range(self._at_once):
                    tasks.create_task(self._send_on())
                for arrival_s, request in zip(self._arrivals_s, self._requests, strict=False):
                    await asyncio.sleep(self.began_s + arrival_s - time.perf_counter())
                    tasks.create_task(self._send(request))
                if self._at_once:
                    return
                draining.reschedule(asyncio.get_running_loop().time() + self._drain_s)

    async def _send_on(self) -> None:
        for request in self._requests:
            await self._send(request)

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
        self._read_s: float | None = None
        """Time of the read whose events are being taken."""

        self._prompt_tokens = 0
        self.outcome = Outcome.UNFINISHED

    async def receive(self, client: httpx2.AsyncClient) -> None:
        try:
            async with client.sse(
                self._request.url, method="POST", json=self._request.body
            ) as events:
                events.response.raise_for_status()
                async for event in events:
                    if event.data != _DONE:
                        self._take(orjson.loads(event.data))
        except (httpx2.HTTPError, ValueError):
            self.outcome = Outcome.FAILED
        if self.outcome is Outcome.UNFINISHED:  # The stream ended before the answer did.
            self.outcome = Outcome.FAILED

    def timeline(self, began_s: float) -> RequestTimeline:
        return RequestTimeline(
            rid=self._request.custom_id,
            arrival_s=self._sent_s - began_s,
            token_times_s=tuple(time_s - began_s for time_s in self._token_times_s),
            prompt_tokens=self._prompt_tokens,
            outcome=self.outcome,
        )

    def _delivered_s(self) -> float:
        """Return the time at which the event came: all events of one read came together.

        They are taken one after the other, before the event loop goes on.
        """
        if self._read_s is None:
            self._read_s = time.perf_counter()
            asyncio.get_running_loop().call_soon(self._end_read)
        return self._read_s

    def _end_read(self) -> None:
        self._read_s = None

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.outcome = Outcome.FAILED
            return
        # The latter on SGLang's own route.
        if usage := event.get("usage") or event.get("meta_info"):
            self._prompt_tokens = usage["prompt_tokens"]
            fresh = usage["completion_tokens"] - len(self._token_times_s)
            self._token_times_s += [self._delivered_s()] * fresh
        for choice in (*event.get("choices", ()), event.get("meta_info", {})):
            reason = choice.get("finish_reason")
            if reason == "abort" or (isinstance(reason, dict) and reason["type"] == "abort"):
                self.outcome = Outcome.FAILED
            elif reason is not None:
                self.outcome = Outcome.FINISHED
