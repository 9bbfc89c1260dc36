"""Takes the unfinished lines of one batch to their records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus

from sglang_coserve.batch.backend import LineRequest, LineResult
from sglang_coserve.batch.context import BatchContext
from sglang_coserve.batch.errors import StorageError
from sglang_coserve.batch.fair_slots import Lane
from sglang_coserve.batch.journal import TokenJournal
from sglang_coserve.batch.line_parser import LineParser
from sglang_coserve.batch.line_source import InputLine, LineSource
from sglang_coserve.batch.record import BatchRecord, Progress, Usage
from sglang_coserve.batch.result_log import ResultLog
from sglang_coserve.batch.result_record import encode_result, encode_unserved, usage_of
from sglang_coserve.batch.result_writer import ResultWriter
from sglang_coserve.batch.retry import RetryPolicy
from sglang_coserve.batch.serve_line import serve_line
from sglang_coserve.jsonl.body_limits import BodyTooLargeError
from sglang_coserve.jsonl.request_line import RequestLine, estimate_tokens

__all__ = ["BatchRun"]


class BatchRun:
    """One pass over the lines of a batch that have no record, however earlier passes ended.

    ``commit`` is told what is on the disk. A pass that is cancelled, or fails, has
    written what was finished, and another one goes on from there.
    """

    def __init__(
        self,
        batch: BatchRecord,
        lane: Lane,
        context: BatchContext,
        commit: Callable[[Progress], Awaitable[None]],
    ) -> None:
        self._batch = batch
        self._lane = lane
        self._context = context
        self._commit = commit
        limits, directory = context.limits, context.directory
        self._lines = LineParser(
            directory.file(batch.input_file_id),
            batch.endpoint,
            context.backend.limits,
            context.threads,
        )
        self._retries = RetryPolicy(
            limits.max_attempts, limits.first_retry_delay_s, limits.max_retry_delay_s
        )
        self._log = ResultLog(
            batch.id,
            directory.file(batch.output_file_id),
            directory.file(batch.error_file_id),
            directory.sync_files,
        )
        self._journal = TokenJournal(
            directory.journal(batch.id), context.backend.model, limits.journal_compact_bytes
        )

    async def serve(self) -> None:
        """Have the engine serve every unfinished line.

        Raises:
            StorageError: the disk is full or failing.
        """
        async with self._open() as (source, writer):
            await self._context.threads.run(self._journal.load, source.finished)
            self._context.slots.join(self._lane)
            try:
                await _unwrapped(self._serve_lines(source, writer))
            finally:
                self._context.slots.leave(self._lane)
                await self._write_journal()

    async def give_up(self, code: str, message: str) -> None:
        """Write an error record for every unfinished line.

        Raises:
            StorageError: the disk is full or failing.
        """
        async with self._open() as (source, writer):
            async for line in source:
                await writer.room()
                custom_id = await self._lines.custom_id(line)
                record = encode_unserved(self._batch.id, line.number, custom_id, code, message)
                writer.add(record, is_ok=False, usage=Usage(), estimated_tokens=0)

    async def settle(self) -> None:
        """Count what the files hold, and forget the tokens of unfinished lines.

        Raises:
            StorageError: the disk is full or failing.
        """
        async with self._open():
            pass
        await self._context.threads.run(self._journal.delete)

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[tuple[LineSource, ResultWriter]]:
        batch, context = self._batch, self._context
        mean_estimate_tokens = batch.estimated_tokens // max(1, batch.total_lines)
        recovered = await context.threads.run(
            self._log.recover, batch.progress, mean_estimate_tokens
        )
        source = LineSource(
            context.directory.file(batch.input_file_id),
            context.limits.max_line_bytes,
            recovered.finished,
            context.threads,
        )
        writer = ResultWriter(
            self._log,
            recovered.progress,
            self._commit,
            context.threads,
            context.clock,
            context.limits.flush_interval_s,
        )
        try:
            yield source, writer
        finally:
            await writer.close()

    async def _serve_lines(self, source: LineSource, writer: ResultWriter) -> None:
        async with asyncio.TaskGroup() as watchers:
            watching = watchers.create_task(writer.failure())
            journaling = watchers.create_task(self._journal_regularly())
            async with asyncio.TaskGroup() as lines:
                async for line in source:
                    await writer.room()
                    try:
                        request = await self._lines.parse(line)
                    except BodyTooLargeError as error:
                        await self._refuse(line, str(error), writer)
                        continue
                    size_bytes = len(line.content)
                    estimated_tokens = estimate_tokens(size_bytes, request.body)
                    await self._context.slots.acquire(self._lane, size_bytes, estimated_tokens)
                    task = lines.create_task(
                        self._serve(line.number, request, estimated_tokens, writer)
                    )
                    # Not in the task: one that is cancelled before its first step runs no code.
                    task.add_done_callback(partial(self._release, size_bytes, estimated_tokens))
            watching.cancel()
            journaling.cancel()

    async def _serve(
        self,
        line: int,
        request: RequestLine,
        estimated_tokens: int,
        writer: ResultWriter,
    ) -> int:
        """Return the tokens that the line took."""
        batch = self._batch
        line_request = LineRequest(
            batch_id=batch.id,
            line=line,
            custom_id=request.custom_id,
            endpoint=batch.endpoint,
            body=request.body,
            generated=(),
            deadline_s=batch.expires_at_s,
            priority=batch.priority,
            weight=batch.weight,
        )
        result = await serve_line(line_request, self._journal, self._retries, self._context)
        usage = usage_of(result.body)
        record = await self._context.threads.run(
            encode_result, batch.id, line, request.custom_id, result
        )
        writer.add(
            record,
            is_ok=result.status_code < 400,
            usage=usage,
            estimated_tokens=estimated_tokens,
        )
        self._journal.drop(line)
        return usage.total_tokens

    def _release(self, size_bytes: int, estimated_tokens: int, task: asyncio.Task[int]) -> None:
        tokens = 0 if task.cancelled() or task.exception() else task.result()
        self._context.slots.release(self._lane, size_bytes, estimated_tokens, tokens)

    async def _refuse(self, line: InputLine, why: str, writer: ResultWriter) -> None:
        """Write the record of a line that is too large for the engine."""
        custom_id = await self._lines.custom_id(line)
        error = {"message": why, "type": "invalid_request_error", "param": None, "code": None}
        result = LineResult(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "", {"error": error})
        writer.add(
            encode_result(self._batch.id, line.number, custom_id, result),
            is_ok=False,
            usage=Usage(),
            estimated_tokens=estimate_tokens(len(line.content), {}),
        )

    async def _journal_regularly(self) -> None:
        while True:
            await self._context.clock.sleep(self._context.limits.journal_interval_s)
            await self._write_journal()

    async def _write_journal(self) -> None:
        if self._journal.has_unwritten:
            written, is_rewrite = self._journal.take_unwritten()
            await self._context.threads.run(self._journal.write, written, is_rewrite)


async def _unwrapped(work: Awaitable[None]) -> None:
    """Await ``work``, whose task groups would hide a StorageError in groups of errors."""
    try:
        await work
    except BaseExceptionGroup as group:
        storage, others = group.split(StorageError)
        if storage is None or others is not None:
            raise
        first: BaseException = storage
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from group
