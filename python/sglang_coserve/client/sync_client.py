"""The client for code without an event loop: runs the asyncio client on a loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, Self, TypeVar

from sglang_coserve.client.async_client import DEFAULT_BASE_URL, AsyncCoserveClient, AsyncJob
from sglang_coserve.client.local_batch import ClientOptions
from sglang_coserve.client.progress import JobStatus
from sglang_coserve.client.results import BatchResult
from sglang_coserve.client.server_batch import BatchOptions

__all__ = ["CoserveClient", "Job"]

_T = TypeVar("_T")


class _LoopThread:
    """An event loop in a thread that does not keep the process alive."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="coserve-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run ``work`` on the loop and return what it returns."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], _T]) -> _T:
        """Call ``function`` on the loop and return what it returns."""

        async def work() -> _T:
            return function()

        return self.run(work())

    def close(self) -> None:
        """Stop the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Job:
    """A submitted file; see ``AsyncJob``."""

    def __init__(self, job: AsyncJob, loop: _LoopThread) -> None:
        self.output = job.output
        """Where results go, in OpenAI's batch output format."""

        self.errors = job.errors
        """Where failed lines go; not there when no line failed."""

        self._job = job
        self._loop = loop

    @property
    def status(self) -> JobStatus:
        """The progress of the job."""
        return self._loop.call(lambda: self._job.status)

    def wait(self, *, progress: bool = False) -> JobStatus:
        """Wait for the end and return the final status; see ``AsyncJob.wait``."""
        return self._loop.run(self._job.wait(progress=progress))

    def cancel(self) -> None:
        """Stop the job; see ``AsyncJob.cancel``."""
        self._loop.call(self._job.cancel)


class CoserveClient:
    """A client of one server, for use in a ``with`` statement; see ``AsyncCoserveClient``.

    Its jobs run in the background until they end or the client is closed.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_BASE_URL,
        *,
        api_key: str | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        self._client = AsyncCoserveClient(base_url, api_key=api_key, options=options)
        self._loop = _LoopThread()

    def submit_jsonl(
        self,
        source: str | Path,
        output: str | Path,
        *,
        retry_failed: bool = False,
        batch_options: BatchOptions | None = None,
        use_batch: bool | None = None,
    ) -> Job:
        """Start, or continue, a batch; see ``AsyncCoserveClient.submit_jsonl``."""
        submitting = self._client.submit_jsonl(
            source,
            output,
            retry_failed=retry_failed,
            batch_options=batch_options,
            use_batch=use_batch,
        )
        return Job(self._loop.run(submitting), self._loop)

    def results(self, job: Job) -> Iterator[BatchResult]:
        """Yield every result of ``job``; see ``AsyncCoserveClient.results``."""
        results = self._client.results(job._job)
        try:
            with suppress(StopAsyncIteration):
                while True:
                    yield self._loop.run(anext(results))
        finally:
            self._loop.run(results.aclose())

    def close(self) -> None:
        """Cancel the jobs that still run and close every connection."""
        self._loop.run(self._client.close())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
