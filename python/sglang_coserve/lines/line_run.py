"""Serves the unfinished lines of one job and writes their records."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from sglang_coserve.errors import CoserveError
from sglang_coserve.jsonl.lines import FileLine
from sglang_coserve.jsonl.request_line import RequestLine, estimate_tokens, output_limit, parse_json
from sglang_coserve.lines.backend import LineRequest, LineResult
from sglang_coserve.lines.engine_lines import MAX_DEATHS
from sglang_coserve.lines.fair_slots import Grant, JobShare
from sglang_coserve.lines.journal import LineTokens
from sglang_coserve.lines.line_source import LineSource
from sglang_coserve.lines.result_log import ResultWriter
from sglang_coserve.lines.result_record import encode_record, usage_of
from sglang_coserve.lines.serve_line import LineContext, serve_line

_log = logging.getLogger(__name__)

_NO_ANSWER: Final = {"max_tokens": 0}
"""A body of which only the prompt takes tokens."""


class OutputLengths:
    """Mean output lengths of finished lines, preferably of those with a similar limit.

    Little else predicts the length of an answer: if the limits are not informative, all lines
    are expected to be alike. Short lines finish
    first, so the first means are too small.
    """

    def __init__(self) -> None:
        self._lines: Counter[int] = Counter()
        self._tokens: Counter[int] = Counter()
        """Answered lines and their output, by the number of bits in the limit; 0 without one."""

    def add(self, limit: int | None, output_tokens: int) -> None:
        """Record an answered line with this limit, or without one. O(1)."""
        self._lines[_size(limit)] += 1
        self._tokens[_size(limit)] += output_tokens

    def expected(self, limit: int | None) -> int | None:
        """Return the expected output tokens of a line; None before one was answered. O(1).

        ``limit`` is the line's own limit of output tokens; None without one. The mean of
        all lines weighs as much as one line with a similar limit.
        """
        if not self._lines:
            return None
        mean, size = self._tokens.total() / self._lines.total(), _size(limit)
        tokens = round((self._tokens[size] + mean) / (self._lines[size] + 1))
        return tokens if limit is None else min(tokens, max(0, limit))


def _size(limit: int | None) -> int:
    return 0 if limit is None else max(0, limit).bit_length()


@dataclass(frozen=True, slots=True)
class UnservedLine:
    """A line that gets a result without being sent to the engine."""

    custom_id: str | None
    result: LineResult


class LineJob(Protocol):
    """The properties of a job that ``LineRun`` needs."""

    id: str
    tag: int
    """Identifies the job in the records of its lines (see ``encode_record``)."""

    share: JobShare
    """Its share of the slots, which knows where its lines are."""

    deadline_s: float | None
    """When it should be complete, in seconds since the epoch; None for no deadline."""

    context_tokens: int
    """Of which no line takes more, prompt and answer."""

    async def parse(self, line: FileLine) -> RequestLine | UnservedLine:
        """Return the request of a line. Called in order of the lines."""

    async def served_by(self, model: str, completed: int) -> None:
        """Note that the result after ``completed`` lines is of ``model``."""


class LineRun:
    """One run over the lines of a job that have no record yet.

    If a run is cancelled or fails, the finished lines are recorded, and another run continues
    with the others.
    """

    def __init__(
        self, job: LineJob, context: LineContext, writer: ResultWriter, journal: LineTokens
    ) -> None:
        self._job = job
        self._context = context
        self._writer = writer
        self._journal = journal
        self._lengths = OutputLengths()

    async def serve(self, lines: LineSource, suspects: LineSource | None = None) -> None:
        """Serve every line, ``suspects`` one at a time.

        Raises:
            StorageError: the disk is full or failing.
            ServerError: no line can be served any more.
        """
        self._context.slots.join(self._job.share)
        try:
            await _unwrapped(self._serve_all(lines, suspects))
        finally:
            self._context.slots.leave(self._job.share)
            await self._journal.save(self._context.threads)

    async def _serve_all(self, lines: LineSource, suspects: LineSource | None) -> None:
        job, slots = self._job, self._context.slots
        async with asyncio.TaskGroup() as watchers:
            meanwhile = [
                watchers.create_task(work)
                for work in (self._writer.failure(), self._journal_regularly())
            ]
            async with asyncio.TaskGroup() as tasks:
                if suspects is not None:
                    tasks.create_task(self._serve_suspects(suspects))
                async for line in lines:
                    request = await self._request(line)
                    if request is None:
                        continue
                    estimated_tokens = self._estimate(line, request.body)
                    slot = await slots.acquire(job.share, line.size_bytes, estimated_tokens)
                    task = tasks.create_task(self._serve(line, request, estimated_tokens))
                    # As a callback: a task that is cancelled before it starts runs no code.
                    task.add_done_callback(partial(self._release, slot, line))
            for each in meanwhile:
                each.cancel()

    async def _serve_suspects(self, lines: LineSource) -> None:
        """Serve lines that may have crashed the engine; give up those that did so twice.

        They take no slots, as each is alone in the engine.
        """
        engine_lines = self._context.engine_lines
        deaths: Mapping[int, int] = engine_lines.suspects_of(self._job.id)
        with engine_lines.turns.suspects():
            async for line in lines:
                request = await self._request(line)
                if request is None:
                    continue
                if deaths[line.number] < MAX_DEATHS:
                    estimated_tokens = self._estimate(line, request.body)
                    await self._serve(line, request, estimated_tokens)
                    continue
                message = (
                    f"the engine ended {MAX_DEATHS} times while it served this line,"
                    " which is not tried again"
                )
                _log.error("%s, line %d: %s", self._job.id, line.number, message)
                result = LineResult.unserved("engine_failed", message)
                await self._record(line, request.custom_id, result)

    async def _request(self, line: FileLine) -> RequestLine | None:
        """Return the request of a line; None if the line is recorded unserved."""
        await self._writer.room()
        parsed = await self._job.parse(line)
        if isinstance(parsed, UnservedLine):
            await self._record(line, parsed.custom_id, parsed.result)
            return None
        return parsed

    async def _serve(self, line: FileLine, request: RequestLine, estimated_tokens: int) -> int:
        """Serve a line and write its record; return the tokens that it took.

        A line that failed counts with its estimate: it may have had its slot for hours.
        """
        limit = output_limit(request.body)
        line_request = LineRequest(
            batch_id=self._job.id,
            line=line.number,
            endpoint=request.url,
            body=request.body,
            deadline_s=self._job.deadline_s,
            expected_output_tokens=self._lengths.expected(limit),
        )

        async def fresh_body() -> Any:
            assert line.content is not None
            return (await self._context.threads.run(parse_json, line.content))["body"]

        result, model = await serve_line(
            line_request, fresh_body, self._journal, self._context, self._job.share
        )
        usage = usage_of(result.body)
        if result.is_ok:
            self._lengths.add(limit, usage.output_tokens)
        await self._record(line, request.custom_id, result, estimated_tokens, model)
        self._journal.drop(line.number)
        return usage.total_tokens if result.is_ok else max(usage.total_tokens, estimated_tokens)

    async def _record(
        self,
        line: FileLine,
        custom_id: str | None,
        result: LineResult,
        estimated_tokens: int | None = None,
        model: str | None = None,
    ) -> None:
        """Write the record of a line; ``model`` has answered it, None if it was not served."""
        # Not in a thread: the encoder would hold the interpreter lock there, too.
        record = encode_record(self._job.tag, line.number, custom_id, result)
        if estimated_tokens is None:
            estimated_tokens = self._estimate(line, {})
        try:
            if model is not None:
                await self._job.served_by(model, self._writer.progress.completed)
        finally:
            # Record the answer even if the job is stopped meanwhile.
            self._writer.add(
                record,
                is_ok=result.is_ok,
                usage=usage_of(result.body),
                estimated_tokens=estimated_tokens,
            )

    def _estimate(self, line: FileLine, body: Mapping[str, Any]) -> int:
        return estimate_tokens(line.size_bytes, body, self._job.context_tokens)

    def _release(self, slot: Grant, line: FileLine, task: asyncio.Task[int]) -> None:
        if task.cancelled() or task.exception():
            generated = self._journal.tokens(line.number)
            tokens = self._estimate(line, _NO_ANSWER) + len(generated)
        else:
            tokens = task.result()
        self._context.slots.release(slot, tokens)

    async def _journal_regularly(self) -> None:
        # Thousands of jobs may wait for their turn: they take no time meanwhile.
        while True:
            await self._journal.has_grown.wait()
            await self._context.clock.sleep(self._context.journal_interval_s)
            self._journal.has_grown.clear()
            await self._journal.save(self._context.threads)


async def _unwrapped(work: Awaitable[None]) -> None:
    """Await ``work``, whose task groups would hide its error in groups of errors. One that nobody
    expects is raised rather than a CoserveError."""
    try:
        return await work
    except ExceptionGroup as group:
        _, unexpected = group.split(CoserveError)
        first: Exception = unexpected or group
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    raise first
