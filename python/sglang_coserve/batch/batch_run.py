"""Takes the unfinished lines of one batch to their records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path

from sglang_coserve.batch.backend import LineRequest, LineResult
from sglang_coserve.batch.context import BatchContext
from sglang_coserve.batch.engine_lines import MAX_DEATHS
from sglang_coserve.batch.errors import StorageError
from sglang_coserve.batch.fair_slots import Lane
from sglang_coserve.batch.journal import TokenJournal
from sglang_coserve.batch.line_bitmap import LineBitmap
from sglang_coserve.batch.line_parser import LineParser
from sglang_coserve.batch.line_source import InputLine, LineSource
from sglang_coserve.batch.output_lengths import OutputLengths
from sglang_coserve.batch.prefix_order import PrefixOrder
from sglang_coserve.batch.record import BatchRecord, Progress, Usage
from sglang_coserve.batch.result_log import ResultLog
from sglang_coserve.batch.result_record import encode_result, encode_unserved, usage_of
from sglang_coserve.batch.result_writer import ResultWriter
from sglang_coserve.batch.retry import RetryPolicy
from sglang_coserve.batch.serve_line import serve_line
from sglang_coserve.batch.state import ServedBy
from sglang_coserve.jsonl.body_limits import BodyTooLargeError
from sglang_coserve.jsonl.request_line import RequestLine, estimate_tokens

__all__ = ["BatchRun"]

_log = logging.getLogger(__name__)


class BatchRun:
    """One pass over the lines of a batch that have no record, however earlier passes ended.

    ``commit`` is told what is on the disk, ``served_by`` what model the results are of. A
    pass that is cancelled, or fails, has written what was finished, and another one goes on
    from there.
    """

    def __init__(
        self,
        batch: BatchRecord,
        lane: Lane,
        context: BatchContext,
        commit: Callable[[Progress], Awaitable[None]],
        served_by: Callable[[ServedBy], Awaitable[None]],
    ) -> None:
        self._batch = batch
        self._lane = lane
        self._context = context
        self._commit = commit
        self._served_by = served_by
        self._model = batch.model
        self._lengths = OutputLengths()
        self._suspects = context.engine_lines.suspects_of(batch.id)
        limits, directory = context.limits, context.directory
        self._parser = LineParser(
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

        self._order = PrefixOrder(
            directory.file(batch.input_file_id),
            directory.order(batch.id),
            limits.max_in_flight,
        )

    async def serve(self) -> None:
        """Have the engine serve every unfinished line.

        Raises:
            StorageError: the disk is full or failing.
        """
        async with self._open() as (finished, writer):
            num_foreign = await self._context.threads.run(self._journal.load, finished)
            if num_foreign:
                _log.warning(
                    "batch %s: %d half-done lines start over: another model began them",
                    *(self._batch.id, num_foreign),
                )
            self._context.slots.join(self._lane)
            try:
                await _unwrapped(self._serve_lines(finished, writer))
            finally:
                self._context.slots.leave(self._lane)
                await self._write_journal()

    async def give_up(self, code: str, message: str) -> None:
        """Write an error record for every unfinished line.

        Raises:
            StorageError: the disk is full or failing.
        """
        async with self._open() as (finished, writer):
            async for line in self._lines(lambda line: line not in finished):
                await writer.room()
                custom_id = await self._parser.custom_id(line)
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
        await self._context.threads.run(self._order.delete)

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[tuple[LineBitmap, ResultWriter]]:
        batch, context = self._batch, self._context
        mean_estimate_tokens = batch.estimated_tokens // max(1, batch.total_lines)
        recovered = await context.threads.run(
            self._log.recover, batch.progress, mean_estimate_tokens
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
            yield recovered.finished, writer
        finally:
            await writer.close()

    def _lines(self, is_wanted: Callable[[int], bool], order: Path | None = None) -> LineSource:
        context = self._context
        path = context.directory.file(self._batch.input_file_id)
        return LineSource(path, context.limits.max_line_bytes, is_wanted, context.threads, order)

    async def _serve_lines(self, finished: LineBitmap, writer: ResultWriter) -> None:
        suspects = {line for line in self._suspects if line not in finished}
        async with asyncio.TaskGroup() as watchers:
            watching = watchers.create_task(writer.failure())
            journaling = watchers.create_task(self._journal_regularly())
            ordering = watchers.create_task(self._order.find(self._batch.total_lines))
            async with asyncio.TaskGroup() as lines:
                if suspects:
                    lines.create_task(self._serve_suspects(suspects, writer))
                async for line in self._lines(
                    lambda line: line not in finished and line not in suspects, self._order.path
                ):
                    await writer.room()
                    try:
                        request = await self._parser.parse(line)
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
            ordering.cancel()

    async def _serve_suspects(self, suspects: Collection[int], writer: ResultWriter) -> None:
        """Serve lines that the engine may have died of, and give up those of which it surely did.

        They take no slots: each is alone in the engine.
        """
        with self._context.engine_lines.serving_suspects():
            async for line in self._lines(lambda line: line in suspects):
                await writer.room()
                try:
                    request = await self._parser.parse(line)
                except BodyTooLargeError as error:
                    await self._refuse(line, str(error), writer)
                    continue
                if self._suspects[line.number] < MAX_DEATHS:
                    estimated_tokens = estimate_tokens(len(line.content), request.body)
                    await self._serve(line.number, request, estimated_tokens, writer)
                    continue
                message = (
                    f"the engine ended {MAX_DEATHS} times while it served this line,"
                    " which is not tried again"
                )
                _log.error("batch %s, line %d: %s", self._batch.id, line.number, message)
                record = encode_unserved(
                    self._batch.id, line.number, request.custom_id, "engine_failed", message
                )
                writer.add(record, is_ok=False, usage=Usage(), estimated_tokens=0)

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
            endpoint=batch.endpoint,
            body=request.body,
            generated=(),
            deadline_s=batch.expires_at_s,
            expected_output_tokens=self._lengths.expected(request.body),
        )
        result, model = await serve_line(line_request, self._journal, self._retries, self._context)
        usage = usage_of(result.body)
        if result.status_code < 400:
            self._lengths.add(request.body, usage.output_tokens)
        record = await self._context.threads.run(
            encode_result, batch.id, line, request.custom_id, result
        )
        try:
            if model != self._model:
                # At once, so that whoever is next does not say it again with another number.
                self._model = model
                await self._served_by(ServedBy(model, writer.completed))
        finally:
            # The answer counts, also when the batch is stopped meanwhile.
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
        custom_id = await self._parser.custom_id(line)
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
