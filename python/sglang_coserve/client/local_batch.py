"""A file whose lines this client sends itself, one by one."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Final

from sglang_coserve.client.line_checker import LineChecker
from sglang_coserve.client.options import ClientOptions
from sglang_coserve.client.result_files import ResultFiles, file_errors
from sglang_coserve.client.status import JobState, JobStatus
from sglang_coserve.jsonl.lines import is_blank, read_lines
from sglang_coserve.jsonl.request_line import RequestLine
from sglang_coserve.lines.context import LineContext
from sglang_coserve.lines.fair_slots import JobShare
from sglang_coserve.lines.journal import TokenJournal
from sglang_coserve.lines.line_run import LineRun, UnservedLine
from sglang_coserve.lines.line_source import InputLine, LineSource
from sglang_coserve.lines.prefix_order import PrefixOrder
from sglang_coserve.lines.progress import Progress
from sglang_coserve.lines.result_writer import ResultWriter

__all__ = ["LocalBatch"]

_COMPACT_BYTES: Final = 64 << 20


class LocalBatch:
    """One input as a job of the line engine (``LineJob``)."""

    id = ""
    deadline_s = math.inf
    model = ""

    def __init__(
        self, source: Path, files: ResultFiles, context: LineContext, options: ClientOptions
    ) -> None:
        """Take over open ``files``, which are closed when the run ends."""
        self.share = JobShare("", priority=0, weight=1.0, deadline_s=math.inf)
        self._source = source
        self._files = files
        self._context = context
        self._options = options
        self._order = PrefixOrder(source, _beside(files.output, "coserve-order"), unique_ids=True)
        self._checker = LineChecker(options.max_line_bytes, files.finished.__contains__)
        self._run: LineRun | None = None
        self._writer: ResultWriter | None = None
        self._total_bytes = source.stat().st_size
        self._earlier = files.log.progress
        self._began_s = time.monotonic()
        self._ended_s: float | None = None

    def status(self, state: JobState) -> JobStatus:
        """Return the progress of the run."""
        progress = self._writer.progress if self._writer else self._earlier
        recorded_bytes = self._run.recorded_bytes if self._run else 0
        is_done = state is JobState.COMPLETED
        return JobStatus(
            state=state,
            ok=progress.completed,
            failed=progress.failed,
            resumed=self._earlier.lines,
            done_bytes=self._total_bytes
            if is_done
            else self._files.finished.size_bytes + recorded_bytes,
            total_bytes=self._total_bytes,
            prompt_tokens=progress.usage.input_tokens,
            completion_tokens=progress.usage.output_tokens,
            elapsed_s=(self._ended_s or time.monotonic()) - self._began_s,
            trouble=self._context.health.last_failure if state is JobState.RUNNING else None,
            ordered_share=self._order.read_share,
        )

    async def run(self) -> None:
        """Write a record for every line that has none, then close the files.

        What was written is on the disk however it ends.

        Raises:
            ServerGoneError, ServerError: no line can be served any more.
            InputFileError: a record cannot be written.
        """
        context = self._context
        try:
            with file_errors():
                self._order.delete()  # The input may have changed since an earlier run.
                self._writer = ResultWriter(
                    self._files.log,
                    _ignore,
                    context.threads,
                    context.clock,
                    context.flush_interval_s,
                )
                try:
                    await self._serve(self._writer)
                finally:
                    await self._writer.close()
        finally:
            self._order.delete()
            self._checker.close()
            self._files.close()
            self._ended_s = time.monotonic()

    async def _serve(self, writer: ResultWriter) -> None:
        lines = LineSource(
            self._source,
            self._options.max_line_bytes,
            lambda line: line not in self._files.finished,
            self._context.threads,
            self._order.path,
            unique_ids=True,
        )
        journal = TokenJournal(
            _beside(self._files.output, "coserve-tokens"), self.model, _COMPACT_BYTES
        )
        self._run = LineRun(self, self._context, writer, journal)
        await self._run.serve(lines, self._find_order())

    async def _find_order(self) -> None:
        # A server orders by itself what it has at once.
        if await self._context.threads.run(self._has_more_lines, self._options.concurrency):
            await self._order.find()

    def _has_more_lines(self, count: int) -> bool:
        with self._source.open("rb") as file:
            for line in read_lines(file, self._options.max_line_bytes):
                count -= not is_blank(line.content)
                if count < 0:
                    return True
        return False

    def tag(self, line: InputLine) -> int:
        """See ``LineJob``: the line's digest, by which a later run finds out that it changed."""
        return line.digest

    async def parse(self, line: InputLine) -> RequestLine | UnservedLine | None:
        """See ``LineJob``."""
        return self._checker.check(line)

    async def model_changed(self, model: str, completed: int) -> None:
        """See ``LineJob``: a server is asked for one model by each line."""


def _beside(output: Path, suffix: str) -> Path:
    return output.with_name(f"{output.name.removesuffix('.jsonl')}.{suffix}")


async def _ignore(_: Progress) -> None:
    pass
