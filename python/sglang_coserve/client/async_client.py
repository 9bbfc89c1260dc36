"""The client: submits a file of requests, follows its progress, and returns the results."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from sglang_coserve.client.batch_api import BatchApi
from sglang_coserve.client.local_batch import ClientOptions, LocalBatch
from sglang_coserve.client.output_files import (
    BatchResult,
    ResultFiles,
    ResultStream,
    errors_path,
    open_input,
)
from sglang_coserve.client.progress import JobState, JobStatus, showing
from sglang_coserve.client.server_batch import BatchOptions, ServerBatch, submission_path
from sglang_coserve.errors import ConfigError, InputFileError, ServerError
from sglang_coserve.lines.background import Clock, WorkerThreads, to_its_end
from sglang_coserve.lines.engine_lines import EngineLines
from sglang_coserve.lines.fair_slots import FairSlots
from sglang_coserve.lines.serve_line import EngineHealth, LineContext

DEFAULT_BASE_URL = "http://127.0.0.1:30000"

POLL_S = 0.2
"""From one look for new results to the next."""

_JOURNAL_S = 0.25
_THREADS = 2


class JobRun(Protocol):
    """The work of a job."""

    def status(self, state: JobState) -> JobStatus:
        """Return its progress."""

    async def run(self) -> None:
        """Run it. What was written is kept however it ends."""


class AsyncJob:
    """A submitted file. It runs on its own, whether or not anybody waits for it."""

    def __init__(self, run: JobRun, output: Path) -> None:
        self.output = output
        """Where results go, in OpenAI's batch output format."""

        self.errors = errors_path(output)
        """Where failed lines go; not there when no line failed."""

        self._run = run
        self._task = asyncio.create_task(run.run())

    @property
    def is_running(self) -> bool:
        """True until the job has ended and its files are closed."""
        return not self._task.done()

    @property
    def status(self) -> JobStatus:
        """The progress of the job."""
        return self._run.status(self._state())

    async def wait(self, *, progress: bool = False) -> JobStatus:
        """Wait for the end, completed or cancelled, and return the final status.

        Cancelling the wait does not cancel the job.

        Raises:
            ServerGoneError: the server answered nothing for ``retry_for_s``.
            ServerError: the server refuses the API key.
            InputFileError: a result could not be written.
        """
        await (showing(self.ended(), lambda: self.status) if progress else self.ended())
        return self.outcome()

    def outcome(self) -> JobStatus:
        """Return the final status of a job that has ended; raises as ``wait`` does."""
        if not self._task.cancelled():
            self._task.result()
        return self.status

    async def ended(self, timeout_s: float | None = None) -> None:
        """Wait until the job has ended in any way, or for ``timeout_s``."""
        await asyncio.wait({self._task}, timeout=timeout_s)

    def cancel(self) -> None:
        """Stop the job; lines that are not finished are left for the next submission.

        A batch that the server runs goes on there: ``batches.cancel`` ends it.
        """
        # Only once: the first cancellation lets it write the answers that it has.
        if not self._task.cancelling():
            self._task.cancel()

    def _state(self) -> JobState:
        if not self._task.done():
            return JobState.RUNNING
        if self._task.cancelled():
            return JobState.CANCELLED
        return JobState.FAILED if self._task.exception() else JobState.COMPLETED


class AsyncCoserveClient:
    """A client of one server, for use in an ``async with`` statement."""

    def __init__(
        self,
        base_url: str = DEFAULT_BASE_URL,
        *,
        api_key: str | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        """Prepare the client; no connection is made yet.

        Raises:
            ConfigError: the address or the key cannot be used.
        """
        self._options = options or ClientOptions()
        self._base_url, self._api_key = base_url, api_key
        self.batches = BatchApi(base_url, api_key, self._options.retry_policy)
        """The server's Batch API, for batches of any client."""

        self._jobs: list[AsyncJob] = []
        self._threads = WorkerThreads("coserve-client-files", _THREADS)
        # What all jobs share that send lines.
        self._context_of = partial(
            LineContext,
            engine_lines=EngineLines(),
            slots=FairSlots(self._options.concurrency, self._options.max_inflight_bytes),
            threads=self._threads,
            clock=Clock(),
            rng=random.Random(),
            retry_policy=self._options.retry_policy,
            health=EngineHealth(),
            flush_interval_s=0.0,  # Records that arrive during a write are written together.
            journal_interval_s=_JOURNAL_S,
        )

    async def submit_jsonl(
        self,
        source: str | Path,
        output: str | Path,
        *,
        retry_failed: bool = False,
        batch_options: BatchOptions | None = None,
        use_batch: bool | None = None,
    ) -> AsyncJob:
        """Start, or continue, the batch in ``source``.

        The server runs it when it has a Batch API, as ``batch_options`` says; otherwise its lines
        are sent one by one from here. ``use_batch`` overrides this choice. An output is continued
        in the way in which it was begun. A server that cannot be asked yet is waited for;
        ``batches.last_failure`` says why.

        Lines that have a record in ``output`` or its error file are not sent
        again. With ``retry_failed`` the lines in the error file are, one by one.

        Raises:
            InputFileError: a file cannot be used, another client is writing
                ``output``, or ``output`` was made from something else.
            ConfigError: there are ``batch_options``, and lines are sent one by one: ``use_batch``
                is false, ``retry_failed`` true, or ``output`` was begun so.
            ServerError: the server has no Batch API, and ``use_batch`` is true or there are
                ``batch_options``; or it refuses the API key.
            ServerGoneError: it could not be asked for ``retry_for_s``.
        """
        source, output = Path(source), Path(output)
        has_options = batch_options is not None
        open_input(source).close()  # Before a server is waited for.
        if await self._is_for_server(output, retry_failed, use_batch, has_options):
            run: JobRun = ServerBatch(source, output, self.batches, batch_options or BatchOptions())
        else:
            run = await self._line_run(source, output, retry_failed=retry_failed)
        job = AsyncJob(run, output)
        self._jobs = [*(each for each in self._jobs if each.is_running), job]
        # A task that is cancelled before its first step would never close its files.
        await asyncio.sleep(0)
        return job

    async def _is_for_server(
        self, output: Path, retry_failed: bool, use_batch: bool | None, has_options: bool
    ) -> bool:
        if submission_path(output).exists():
            if retry_failed or use_batch is False:
                raise InputFileError(
                    f"{output} is filled by a batch that the server runs, which sends no line "
                    "again: choose another output"
                )
            return True
        found = (path for path in (output, errors_path(output)) if path.exists())
        is_begun = any(path.stat().st_size for path in found)
        if retry_failed or use_batch is False or is_begun:
            if has_options:
                reason = f", as those of {output} before" if is_begun else ""
                raise ConfigError(
                    "a window and a priority are for a batch that the server runs, and"
                    f" these lines are sent one by one{reason}: leave them out"
                )
            return False
        is_on = await self.batches.is_on()
        if not is_on and (use_batch or has_options):
            wanted = "a batch" if use_batch else "a window and a priority"
            raise ServerError(
                f"the server has no Batch API, which {wanted} would need: start it with"
                " --coserve-data-dir, or leave the lines to be sent one by one without these"
            )
        return is_on

    async def _line_run(self, source: Path, output: Path, *, retry_failed: bool) -> LocalBatch:
        files = ResultFiles(output)
        options = self._options
        try:
            await to_its_end(
                asyncio.to_thread(
                    files.open, source, options.max_line_bytes, retry_failed=retry_failed
                )
            )
        except asyncio.CancelledError:
            files.close()
            raise
        # It loads aiohttp, without which commands about batches begin 0.2 s earlier.
        from sglang_coserve.client.line_server import LineServer

        server = LineServer(
            self._base_url, self._api_key, options.concurrency, options.request_timeout_s
        )
        return LocalBatch(source, files, server, self._context_of(backend=server), options)

    async def results(self, job: AsyncJob) -> AsyncGenerator[BatchResult]:
        """Yield every result of ``job``, those of earlier runs too, until it has ended.

        The order is not that of the input; good and failed lines mix.

        Raises:
            CoserveError: the job failed; raised after the results it wrote.
        """
        stream = ResultStream(job.output)
        has_ended = False
        while not has_ended:
            has_ended = not job.is_running
            while results := stream.read_new():
                for result in results:
                    yield result
            if not has_ended:
                await job.ended(POLL_S)
        job.outcome()

    async def close(self) -> None:
        """Cancel the jobs that still run and close every connection."""
        for job in self._jobs:
            job.cancel()
        for job in self._jobs:
            await job.ended()
        await self._threads.close()
        await self.batches.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
