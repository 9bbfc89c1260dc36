"""The client: submits a file of requests, follows its progress, and returns the results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Self

from sglang_coserve.client.batch_api import BatchApi
from sglang_coserve.client.job import AsyncJob
from sglang_coserve.client.options import BatchOptions, ClientOptions
from sglang_coserve.client.output_files import BatchResult, ResultStream, check_files
from sglang_coserve.client.submission import data_directory, read_submission
from sglang_coserve.errors import ServerError

DEFAULT_BASE_URL = "http://127.0.0.1:30000"

POLL_S = 0.2
"""From one look for new results to the next."""


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
        self._places = asyncio.Semaphore(self._options.concurrency)

    async def submit_jsonl(
        self,
        source: str | Path,
        output: str | Path,
        *,
        batch_options: BatchOptions | None = None,
        use_batch: bool | None = None,
    ) -> AsyncJob:
        """Start, or continue, the batch in ``source``.

        A server with a Batch API keeps the batch. For any other server, or with ``use_batch``
        false, this client keeps it beside ``output``, and sends its lines one by one; with
        ``use_batch`` true that is an error. A batch stays where it was begun. A server that cannot
        be asked yet is waited for; ``batches.last_failure`` says why.

        Raises:
            InputFileError: a file cannot be used, or another client is writing ``output``.
            ServerError: the server has no Batch API, and ``use_batch`` is true; or it refuses the
                API key.
            ServerGoneError: it could not be asked for ``retry_for_s``.
        """
        # Absolute: the caller may change the working directory while the job runs.
        source, output = Path(source).absolute(), Path(output).absolute()
        check_files(source, output)  # Before a server is waited for.
        is_local = await self._is_local(output, use_batch)
        opened = self._local_batches(output) if is_local else nullcontext(self.batches)
        job = AsyncJob(source, output, opened, batch_options or BatchOptions(), is_local=is_local)
        self._jobs = [*(each for each in self._jobs if each.is_running), job]
        # A task that is cancelled before its first step would never close its files.
        await asyncio.sleep(0)
        return job

    async def _is_local(self, output: Path, use_batch: bool | None) -> bool:
        """Return whether this client is to keep the batch of ``output``."""
        if use_batch is False:
            return True
        begun = read_submission(output)
        if begun is not None and use_batch is None:
            return begun.is_local
        is_on = await self.batches.is_on()
        if use_batch and not is_on:
            raise ServerError(
                "the server has no Batch API: start it with --coserve-data-dir, or let the client"
                " keep the batch"
            )
        return not is_on

    def _local_batches(self, output: Path) -> AbstractAsyncContextManager[BatchApi]:
        # They load aiohttp, FastAPI and more, without which other commands begin sooner.
        from sglang_coserve.client.line_server import LineServer
        from sglang_coserve.client.local_batches import open_local_batches

        directory = data_directory(output)
        server = LineServer(self._base_url, self._api_key, self._options, self._places, directory)
        return open_local_batches(directory, server, self._options)

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
        await self.batches.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
