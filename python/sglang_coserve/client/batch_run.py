"""Takes every unfinished line of a file to its record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

from sglang_coserve.client.batch_result import BatchResult
from sglang_coserve.client.byte_budget import ByteBudget
from sglang_coserve.client.input_lines import LineRef, read_line, read_lines
from sglang_coserve.client.line_checker import BatchRequest, LineChecker
from sglang_coserve.client.line_order import LineOrder
from sglang_coserve.client.options import ClientOptions
from sglang_coserve.client.result_files import ResultFiles
from sglang_coserve.client.status import JobState, JobStatus
from sglang_coserve.errors import CoserveError

__all__ = ["BatchRun", "Sender"]

_SYNC_INTERVAL_S = 5.0
_LINES_PER_TURN = 100


class Sender(Protocol):
    """What a run needs of a server."""

    @property
    def trouble(self) -> str | None:
        """Why lines are being retried; None while the server answers."""

    async def send(self, request: BatchRequest) -> BatchResult:
        """Return what became of one line; raise CoserveError to stop the run."""


class BatchRun:
    """One pass over the input.

    ``concurrency`` workers take lines from one reader, so what is in memory is
    the lines in flight, within ``max_inflight_bytes``, and the line being read.

    Lines come in the file's order until a better one is found (``LineOrder``), then in that
    one; those it leaves out, and what is wrong with lines, come last, in the file's order.
    """

    def __init__(
        self, source: Path, files: ResultFiles, sender: Sender, options: ClientOptions
    ) -> None:
        self._source = source
        self._files = files
        self._sender = sender
        self._options = options
        self._budget = ByteBudget(options.max_inflight_bytes)
        self._reading = asyncio.Lock()
        self._order = LineOrder(source)
        self._in_flight: set[int] = set()
        """Numbers of the lines that were yielded and have no record yet."""

        self._num_turns = 0
        self._total_bytes = source.stat().st_size
        self._done_bytes = files.finished.size_bytes
        self._ok = files.earlier_ok
        self._failed = files.earlier_failed
        self._resumed = files.earlier_ok + files.earlier_failed
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._began_s = time.monotonic()
        self._ended_s: float | None = None

    def status(self, state: JobState) -> JobStatus:
        """Return how far the run is."""
        return JobStatus(
            state=state,
            ok=self._ok,
            failed=self._failed,
            resumed=self._resumed,
            done_bytes=self._done_bytes,
            total_bytes=self._total_bytes,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            elapsed_s=(self._ended_s or time.monotonic()) - self._began_s,
            trouble=self._sender.trouble if state is JobState.RUNNING else None,
            ordered_share=self._order.read_share,
        )

    async def run(self) -> None:
        """Write a record for every line that has none, then close the files.

        However it ends, what was written stays and is on the disk.

        Raises:
            ServerGoneError, ServerError: see ``Sender.send``.
            InputFileError: a record cannot be written.
        """
        try:
            async with aclosing(self._requests()) as requests, asyncio.TaskGroup() as tasks:
                syncing = tasks.create_task(self._sync_regularly())
                workers = [
                    tasks.create_task(self._work(requests))
                    for _ in range(self._options.concurrency)
                ]
                await asyncio.wait(workers)
                syncing.cancel()
        except BaseExceptionGroup as group:
            # The first failure stops the other workers; their ends say nothing new.
            first = group.exceptions[0]
            if isinstance(first, CoserveError):
                raise first from None
            raise
        finally:
            self._order.close()
            self._files.close()
            self._ended_s = time.monotonic()

    async def _work(self, requests: AsyncGenerator[BatchRequest]) -> None:
        while request := await self._next(requests):
            try:
                result = await self._sender.send(request)
            finally:
                self._budget.release(len(request.content))
            self._record(result, request.ref)

    async def _next(self, requests: AsyncGenerator[BatchRequest]) -> BatchRequest | None:
        # Reading on waits for room, so at most one line is held beyond the budget.
        async with self._reading:
            request = await anext(requests, None)
            if request is not None:
                await self._budget.acquire(len(request.content))
            return request

    async def _requests(self) -> AsyncGenerator[BatchRequest]:
        """Yield what must be sent; lines that must not be are settled here."""
        checker = LineChecker(self._options.max_line_bytes)
        num_sent = 0
        try:
            for line in read_lines(self._source, self._options.max_line_bytes):
                await self._let_others_run()
                if self._order.is_found():
                    async with aclosing(self._ordered_requests(checker)) as ordered:
                        async for request in ordered:
                            yield request
                if line.is_blank:
                    self._done_bytes += line.ref.size_bytes
                    continue
                if not self._is_wanted(line.ref.number):
                    checker.pass_over(line)
                    continue
                checked = checker.check(line)
                if not isinstance(checked, BatchRequest):
                    self._record(checked, line.ref)
                    continue
                num_sent += 1
                if num_sent > self._options.concurrency:
                    self._order.begin()  # The server cannot order them: it never has them all.
                self._in_flight.add(line.ref.number)
                yield checked
        finally:
            checker.close()

    async def _ordered_requests(self, checker: LineChecker) -> AsyncGenerator[BatchRequest]:
        """Yield what must be sent, in the order that was found."""
        with self._source.open("rb") as file:
            for entry in self._order.entries():
                await self._let_others_run()
                if not self._is_wanted(entry.number):
                    continue
                line = read_line(file, entry, self._options.max_line_bytes)
                request = line and checker.request(line)
                if request:
                    self._in_flight.add(entry.number)
                    yield request

    def _is_wanted(self, line: int) -> bool:
        return line not in self._files.finished and line not in self._in_flight

    async def _let_others_run(self) -> None:
        self._num_turns += 1
        if self._num_turns % _LINES_PER_TURN == 0:
            await asyncio.sleep(0)

    def _record(self, result: BatchResult, ref: LineRef) -> None:
        self._in_flight.discard(ref.number)
        self._files.append(result, ref.digest)
        self._done_bytes += ref.size_bytes
        if not result.ok:
            self._failed += 1
            return
        self._ok += 1
        self._prompt_tokens += result.prompt_tokens
        self._completion_tokens += result.completion_tokens

    async def _sync_regularly(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_INTERVAL_S)
            self._files.sync()
