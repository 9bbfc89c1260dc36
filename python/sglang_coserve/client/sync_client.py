"""The client for code without an event loop: runs the asyncio client on a loop of its own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from anyio.from_thread import start_blocking_portal

from sglang_coserve.client.async_client import DEFAULT_BASE_URL, POLL_S, AsyncCoserveClient
from sglang_coserve.client.job import AsyncJob
from sglang_coserve.client.options import BatchOptions, ClientOptions
from sglang_coserve.client.output_files import BatchResult, ResultStream
from sglang_coserve.client.progress import JobStatus

_T = TypeVar("_T")


class Job:
    """A submitted file; see ``AsyncJob``."""

    def __init__(self, job: AsyncJob, client: CoserveClient) -> None:
        self.output = job.output
        """Where results go, in OpenAI's batch output format."""

        self.errors = job.errors
        """Where failed lines go; not there when no line failed."""

        self._job = job
        self._client = client  # Whose loop must go on.

    @property
    def status(self) -> JobStatus:
        """The progress of the job."""
        return self._job.status

    @property
    def can_continue(self) -> bool:
        """See ``AsyncJob.can_continue``."""
        return self._job.can_continue

    def wait(self, *, progress: bool = False) -> JobStatus:
        """Wait for the end and return the final status; see ``AsyncJob.wait``."""
        if self._job.is_running:
            self._client._run(partial(self._job.wait, progress=progress))
        return self._job.outcome()

    def cancel(self) -> None:
        """Stop the job; see ``AsyncJob.cancel``."""
        if self._job.is_running:
            self._client._portal.call(self._job.cancel)


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
        self._ending = ExitStack()
        portal = start_blocking_portal(name="coserve-client")
        self._portal = self._ending.enter_context(portal)
        self._ending.callback(self._portal.call, self._client.close)

    def submit_jsonl(
        self,
        source: str | Path,
        output: str | Path,
        *,
        batch_options: BatchOptions | None = None,
        use_batch: bool | None = None,
    ) -> Job:
        """Start, or continue, a batch; see ``AsyncCoserveClient.submit_jsonl``."""
        submit = partial(
            self._client.submit_jsonl,
            source,
            output,
            batch_options=batch_options,
            use_batch=use_batch,
        )
        return Job(self._run(submit), self)

    def results(self, job: Job) -> Iterator[BatchResult]:
        """Yield every result of ``job``; see ``AsyncCoserveClient.results``."""
        stream = ResultStream(job.output)
        has_ended = False
        while not has_ended:
            has_ended = not job._job.is_running
            while results := stream.read_new():
                yield from results
            if not has_ended and job._job.is_running:  # It may have ended, and this been closed.
                self._run(partial(job._job.ended, POLL_S))
        job.wait()

    def close(self) -> None:
        """Cancel the jobs that still run and close every connection."""
        self._ending.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run ``work`` on the event loop; what interrupts the wait for it cancels it."""
        future: Future[_T] = self._portal.start_task_soon(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
