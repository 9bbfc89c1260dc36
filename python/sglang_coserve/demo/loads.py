"""The loads of the demo.

A file of offline lines that is long enough for a whole measurement, and requests that are sent at
given times, with the time of every token of their answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import httpx
from httpx_sse import aconnect_sse

from sglang_coserve.errors import InputFileError, unreadable
from sglang_coserve.metrics import Outcome, RequestTimeline
from sglang_coserve.workload.shape import prompt_token_ids
from sglang_coserve.workload.trace import TraceRequest

_LINES_PER_S: Final = 500
"""Twenty times what four CPU cores serve of the bundled sample with the small model."""

_DONE: Final = "[DONE]"
"""The last event of a stream."""

_MAX_BYTES: Final = 64 << 20
"""Of a file that is made by repeating another one."""


def write_offline_load(
    source: Path,
    target: Path,
    seconds: float,
    fields: Mapping[str, Any],
    *,
    lines_in_one: int = 1,
) -> int:
    """Write the lines of ``source`` to ``target``, again and again until they last for ``seconds``.

    Each copy's prompts begin differently, so that none is served from another one's
    cache; within a copy they share what they shared. Return the number of lines.

    Args:
        source: JSONL in OpenAI's batch format, which is checked when it is submitted.
        target: The file to write.
        seconds: How long the lines should last.
        fields: Added to the body of each line.
        lines_in_one: How many lines to join for a longer prompt; above 1 all must be chats.

    Raises:
        InputFileError: ``source`` cannot be read, or has no line.
    """
    try:
        texts = [text for text in source.read_text("utf-8").split("\n") if text.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputFileError(unreadable(source, error)) from error
    if not texts:
        raise InputFileError(f"{source}: there is no request in it")
    if lines_in_one > 1:
        starts = range(0, len(texts), lines_in_one)
        texts = [_joined(texts[start : start + lines_in_one]) for start in starts]
    wanted = max(len(texts), round(seconds * _LINES_PER_S / lines_in_one))
    written = written_bytes = 0
    with target.open("w", encoding="utf-8") as file:
        for text in islice(_copies(texts, fields), wanted):
            if written >= len(texts) and written_bytes > _MAX_BYTES:
                break
            written_bytes += file.write(text + "\n")
            written += 1
    return written


def _joined(texts: Sequence[str]) -> str:
    """Return the first line with the messages of all."""
    first, *others = map(json.loads, texts)
    for other in others:
        first["body"]["messages"] += other["body"]["messages"]
    return json.dumps(first, ensure_ascii=False)


def _copies(texts: list[str], fields: Mapping[str, Any]) -> Iterator[str]:
    for number in count():
        for text in texts:
            yield _copy(text, number, fields)


def _copy(text: str, number: int, fields: Mapping[str, Any]) -> str:
    """Return a line as it is if nothing is to be changed of it; a malformed one in any case."""
    if not number and not fields:
        return text
    try:
        line = json.loads(text)
        body = line["body"]
        body.update(fields)
        if number:
            line["custom_id"] = f"{line['custom_id']}-{number}"
            _begin_differently(body, f"Copy {number}. ")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return text
    return json.dumps(line, ensure_ascii=False)


def _begin_differently(body: dict[str, Any], start: str) -> None:
    if isinstance(body.get("prompt"), str):
        body["prompt"] = start + body["prompt"]
        return
    first = body["messages"][0]
    if isinstance(first["content"], str):
        first["content"] = start + first["content"]


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

    Requests are sent at given times, earlier ones answered or not. A failed request is counted,
    not repeated.
    """

    def __init__(
        self,
        base_url: str,
        requests: Iterable[StreamedRequest],
        *,
        arrivals_s: Iterable[float],
        drain_s: float,
    ) -> None:
        """``drain_s`` after the last arrival, answers still missing are given up."""
        self._client = httpx.AsyncClient(
            base_url=base_url,
            timeout=httpx.Timeout(None, connect=30.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )
        self._arrivals = zip(arrivals_s, requests, strict=True)
        self._drain_s = drain_s
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

    def timelines(self) -> list[RequestTimeline]:
        """Return every request sent, timed in seconds since the load began."""
        return [stream.timeline(self.began_s) for stream in self._streams]

    async def _send_all(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as draining, asyncio.TaskGroup() as tasks:
                for arrival_s, request in self._arrivals:
                    await asyncio.sleep(self.began_s + arrival_s - time.perf_counter())
                    tasks.create_task(self._send(request))
                draining.reschedule(asyncio.get_running_loop().time() + self._drain_s)

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

    async def receive(self, client: httpx.AsyncClient) -> None:
        try:
            async with aconnect_sse(
                client, "POST", self._request.url, json=self._request.body
            ) as source:
                source.response.raise_for_status()
                async for event in source.aiter_sse():
                    if event.data != _DONE:
                        self._take(event.json())
        except (httpx.HTTPError, ValueError):
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

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.outcome = Outcome.FAILED
            return
        # The latter on SGLang's own route.
        if usage := event.get("usage") or event.get("meta_info"):
            self._prompt_tokens = usage["prompt_tokens"]
            fresh = usage["completion_tokens"] - len(self._token_times_s)
            self._token_times_s += [time.perf_counter()] * fresh
        for choice in (*event.get("choices", ()), event.get("meta_info", {})):
            reason = choice.get("finish_reason")
            if reason == "abort" or (isinstance(reason, dict) and reason["type"] == "abort"):
                self.outcome = Outcome.FAILED
            elif reason is not None:
                self.outcome = Outcome.FINISHED
