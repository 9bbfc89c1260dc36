"""Checks, serves, fails or counts the lines of one batch."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from sglang_coserve.batch.context import JobContext
from sglang_coserve.batch.record import JobRecord
from sglang_coserve.batch.state import Failed, Progressed, ServedBy, Validated
from sglang_coserve.durable_files import discard
from sglang_coserve.errors import disk_errors
from sglang_coserve.jsonl.body_limits import BodyTooLargeError, check_body
from sglang_coserve.jsonl.check_file import SCRATCH_VARIABLE, CheckLimits, LineFault
from sglang_coserve.jsonl.lines import SCRATCH_BYTES, FileLine
from sglang_coserve.jsonl.request_line import (
    BadLineError,
    LineTooLargeError,
    RequestLine,
    id_in,
    line_head,
    parse_request_line,
)
from sglang_coserve.lines.backend import LineResult
from sglang_coserve.lines.background import run_module
from sglang_coserve.lines.fair_slots import JobShare
from sglang_coserve.lines.journal import TokenJournal
from sglang_coserve.lines.line_run import LineRun, UnservedLine
from sglang_coserve.lines.line_source import LineBitmap, LineSource
from sglang_coserve.lines.result_log import ResultLog, ResultWriter
from sglang_coserve.lines.result_record import Progress, Usage, batch_tag, encode_record

_log = logging.getLogger(__name__)

_SMALL_BYTES: Final = 1 << 16
"""Takes less than half a millisecond to parse."""

_LEAST_LINE_BYTES: Final = 64
"""No valid line is shorter."""

_READER: Final = "sglang_coserve.jsonl.check_file"


class JobLines:
    """A batch as a job of the line engine (``LineJob``).

    Methods raise ``StorageError`` when the disk is full or failing, or a file has changed.

    ``note`` is called with what is on the disk, and with the model of the results.
    """

    def __init__(
        self,
        batch: JobRecord,
        share: JobShare,
        context: JobContext,
        note: Callable[[Progressed | ServedBy], Awaitable[None]],
    ) -> None:
        self.id = batch.id
        self.tag = batch_tag(batch.id)
        self.share = share
        self.deadline_s: float | None = batch.expires_at_s
        self._model = batch.model
        self.context_tokens = context.backend.limits.context_tokens
        self._batch = batch
        self._context = context
        self._note = note
        directory = context.directory
        self._input = directory.file(batch.input_file_id)
        self._log = ResultLog(
            directory.file(batch.output_file_id),
            directory.file(batch.error_file_id),
            name=f"the results of batch {batch.id}",
            room=partial(directory.room.take, kept_bytes=context.limits.reserved_bytes),
        )
        self._journal = TokenJournal(
            directory.journal(batch.id),
            context.backend.model,
            context.limits.journal_compact_bytes,
            partial(
                directory.room.take,
                kept_bytes=context.limits.journal_free_bytes,
                may_displace=False,
            ),
        )
        self._order = directory.order(batch.id)

    async def check(self) -> Validated | Failed:
        """Return what the input holds, or the faults for which the engine cannot use it.

        The order of the lines of a good one is then on the disk. An engine orders by itself what
        it has at once, but of a long file that is only a few hundred lines at a time.
        """
        limits, backend = self._context.limits, self._context.backend
        wanted = CheckLimits(
            limits.max_lines,
            backend.limits.max_bytes,
            limits.max_reported_errors,
            backend.limits.context_tokens,
            limits.max_in_flight,
            backend.model_names,
        )
        size_bytes = await asyncio.to_thread(_size_bytes, self._input)
        lines = min(limits.max_lines, 1 + size_bytes // _LEAST_LINE_BYTES)
        if await self._context.threads.run(self._has_room, lines * SCRATCH_BYTES):
            scratch = {SCRATCH_VARIABLE: str(self._order.parent)}
        else:  # The lines stay in the order of the file.
            scratch = {SCRATCH_VARIABLE: ""}
        arguments = (json.dumps(asdict(wanted)), str(self._order))
        what = f"checking {self._batch.input_file_id}"
        report = await self._read(what, size_bytes, *arguments, **scratch)
        if report["faults"]:
            return Failed(tuple(LineFault(**fault) for fault in report["faults"]))
        return Validated(report["requests"], report["estimated_tokens"], report["model"])

    async def serve(self) -> None:
        """Have the engine serve every unfinished line."""
        suspects = self._context.engine_lines.suspects_of(self.id)
        async with self._open() as (finished, writer):
            num_foreign = await self._context.threads.run(self._journal.load, finished)
            if num_foreign:
                _log.warning(
                    "batch %s: %d half-done lines start over: another model began them",
                    *(self.id, num_foreign),
                )
            unfinished = {line for line in suspects if line not in finished}
            lines = self._source(
                lambda line: line not in finished and line not in unfinished, self._order
            )
            alone = self._source(unfinished.__contains__) if unfinished else None
            run = LineRun(self, self._context, writer, self._journal)
            await run.serve(lines, alone)

    async def give_up(self, code: str, message: str) -> None:
        """Write an error record for every unfinished line; note the progress then."""
        result = LineResult.unserved(code, message)
        async with self._open() as (finished, writer):
            async for line in self._source(lambda line: line not in finished):
                await writer.room()
                custom_id = (await self.parse(line)).custom_id
                record = encode_record(self.tag, line.number, custom_id, result)
                writer.add(record, is_ok=False, usage=Usage(), estimated_tokens=0)

    async def count(self) -> None:
        """Note the progress that the files hold."""
        async with self._open():
            pass

    async def found(self) -> Progress:
        """Return the contents of the files, with the tokens that are committed."""
        await self._context.threads.run(self._recover, LineBitmap())
        return replace(self._log.progress, usage=self._batch.progress.usage)

    async def forget(self) -> None:
        """Delete the tokens of unfinished lines, and the order of all: nothing will be served."""
        await self._context.threads.run(self._forget)

    async def parse(self, line: FileLine) -> RequestLine | UnservedLine:
        """See ``LineJob``."""
        if line.content is None:
            what = f"reading the line at byte {line.offset} of {self._batch.input_file_id}"
            custom_id = await self._read(what, line.size_bytes, str(line.offset))
            max_bytes = self._context.backend.limits.max_bytes
            message = f"the request is larger than {max_bytes:,} bytes"
            return UnservedLine(custom_id, LineResult.refused(413, message))
        if line.size_bytes <= _SMALL_BYTES:
            return self._parse(line.number, line.content)
        return await self._context.threads.run(self._parse, line.number, line.content)

    def _parse(self, number: int, content: bytes) -> RequestLine | UnservedLine:
        endpoint = self._batch.endpoint
        try:
            try:
                check_body(content, self._context.backend.limits)
                return parse_request_line(content, endpoint)
            except (BodyTooLargeError, LineTooLargeError) as error:
                custom_id = line_head(content, endpoint).custom_id
                return UnservedLine(custom_id, LineResult.refused(413, str(error)))
        except BadLineError as error:
            # Checked by another version, or changed since: one line's fault ends no batch.
            message = f"line {number} cannot be read as it was checked: {error}"
            return UnservedLine(id_in(content), LineResult.refused(400, message))

    def _has_room(self, size_bytes: int) -> bool:
        free_bytes = self._context.directory.free_bytes()
        return free_bytes - size_bytes >= self._context.limits.min_free_bytes

    async def _read(self, what: str, size_bytes: int, *arguments: str, **variables: str) -> Any:
        """Have a process read the input, in turn; it ends when this is cancelled."""
        batch = self._batch
        share = JobShare(batch.owner, batch.priority, batch.expires_at_s)
        async with self._context.reading_turns.one(share, size_bytes):
            path = str(self._input)
            return await run_module(what, _READER, path, batch.endpoint, *arguments, **variables)

    async def served_by(self, model: str, completed: int) -> None:
        """See ``LineJob``."""
        if model != self._model:
            # Before the await, so that the next line does not note the change again.
            self._model = model
            await self._note(ServedBy(model, completed))

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[tuple[LineBitmap, ResultWriter]]:
        finished = LineBitmap()
        await self._context.threads.run(self._recover, finished)
        writer = ResultWriter(
            self._log,
            lambda progress: self._note(Progressed(progress)),
            self._context.threads,
            self._context.clock,
            self._context.flush_interval_s,
        )
        try:
            yield finished, writer
        finally:
            await writer.close()

    def _recover(self, finished: LineBitmap) -> None:
        """Find the records that there are, and cut off what a crash left unfinished. Blocks."""

        def add(tag: int, line: int) -> bool | None:
            return finished.add(line) if tag == self.tag else None

        batch = self._batch
        mean_estimate_tokens = batch.estimated_tokens // max(1, batch.total_lines)
        self._log.scan(add, batch.progress, mean_estimate_tokens)
        self._log.cut()

    def _source(self, is_wanted: Callable[[int], bool], order: Path | None = None) -> LineSource:
        max_bytes, threads = self._context.backend.limits.max_bytes, self._context.threads
        return LineSource(self._input, max_bytes, is_wanted, threads, order)

    def _forget(self) -> None:
        self._journal.delete()
        with disk_errors(f"{self._order} cannot be removed"):
            discard(self._order)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # The process will say what is wrong with it.
