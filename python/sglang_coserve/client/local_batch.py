"""A file whose lines this client sends itself, one by one."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sglang_coserve.client.output_files import ResultFiles, file_errors
from sglang_coserve.client.progress import JobState, JobStatus
from sglang_coserve.errors import ConfigError
from sglang_coserve.jsonl.body_limits import COMMON_CONTEXT_TOKENS
from sglang_coserve.jsonl.lines import FileLine, SeenIds
from sglang_coserve.jsonl.request_line import (
    BadLineError,
    RequestLine,
    custom_id_of,
    parse_json,
    request_of,
)
from sglang_coserve.lines.backend import LineResult
from sglang_coserve.lines.fair_slots import JobShare
from sglang_coserve.lines.journal import LineTokens
from sglang_coserve.lines.line_run import LineRun, UnservedLine
from sglang_coserve.lines.line_source import LineSource
from sglang_coserve.lines.result_log import ResultWriter
from sglang_coserve.lines.result_record import Progress
from sglang_coserve.lines.serve_line import LineContext, RetryPolicy

if TYPE_CHECKING:
    from sglang_coserve.client.line_server import LineServer

_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Settings of a client.

    Raises:
        ConfigError: a value is out of range.
    """

    concurrency: int = 64
    """Lines that the server has at the same time, over all jobs of the client."""

    request_timeout_s: float | None = None
    """Timeout of one attempt; None waits for as long as it takes."""

    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)

    max_line_bytes: int = 64 * _MIB
    """A longer line becomes an error record and is never held in memory."""

    max_inflight_bytes: int = 256 * _MIB
    """Bodies in flight; a single larger one is sent alone."""

    def __post_init__(self) -> None:
        policy = self.retry_policy
        for name, value in (
            ("concurrency", self.concurrency),
            ("max_line_bytes", self.max_line_bytes),
            ("max_inflight_bytes", self.max_inflight_bytes),
            ("max_attempts", policy.max_attempts),
            ("retry_for_s", policy.retry_for_s),
            ("request_timeout_s", self.request_timeout_s),
        ):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be greater than 0, not {value}")


class LocalBatch:
    """One input as a job of the line engine (``LineJob``)."""

    id = ""
    deadline_s: float | None = None
    context_tokens = COMMON_CONTEXT_TOKENS

    def __init__(
        self,
        source: Path,
        files: ResultFiles,
        server: LineServer,
        context: LineContext,
        options: ClientOptions,
    ) -> None:
        """Take over open ``files`` and the ``server``, which are closed when the run ends."""
        self.share = JobShare("", priority=0, deadline_s=math.inf)
        self._source = source
        self._files = files
        self._server = server
        self._context = context
        self._options = options
        self._seen = SeenIds()
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
            self._seen.close()
            self._files.close()
            self._ended_s = time.monotonic()
            await self._server.close()

    async def _serve(self, writer: ResultWriter) -> None:
        lines = LineSource(
            self._source,
            self._options.max_line_bytes,
            lambda _: True,  # Finished ones, too, for their ids.
            self._context.threads,
            with_digests=True,
        )
        # A server sends a line's tokens only in its answer: there are none to keep.
        self._run = LineRun(self, self._context, writer, LineTokens(""))
        await self._run.serve(lines)

    def tag(self, line: FileLine) -> int:
        """See ``LineJob``: the line's digest, by which a later run finds out that it changed."""
        return line.digest

    async def parse(self, line: FileLine) -> RequestLine | UnservedLine | None:
        """See ``LineJob``; None for a finished line.

        A line whose ``custom_id`` appeared on any earlier line is a duplicate, whether or not that
        one was valid. So which line is the duplicate depends on the input alone, and is the same in
        a resumed run.
        """
        fields: object = None
        error: BadLineError | None = None
        if line.content is None:
            limit = self._options.max_line_bytes
            message = f"{line.size_bytes} bytes, more than the limit of {limit}"
            error = BadLineError("line_too_long", message)
        else:
            try:
                fields = parse_json(line.content)
            except BadLineError as found:
                error = found
        custom_id = custom_id_of(fields)
        is_first = custom_id is None or self._seen.add(custom_id)
        if line.number in self._files.finished:
            return None
        try:
            if error is not None:
                raise error
            return _request(fields, is_first=is_first)
        except BadLineError as found:
            return UnservedLine(custom_id, LineResult.unserved(found.code, str(found)))

    async def served_by(self, model: str, completed: int) -> None:
        """See ``LineJob``: a server is asked for one model by each line."""


async def _ignore(_: Progress) -> None:
    pass


def _request(fields: object, *, is_first: bool) -> RequestLine:
    request = request_of(fields, None)
    if not is_first:
        message = "an earlier line has the same custom_id: make it unique"
        raise BadLineError("duplicate_custom_id", message)
    if request.body.get("stream"):
        message = "a batch line cannot stream: remove stream from its body"
        raise BadLineError("stream_not_supported", message)
    return request
