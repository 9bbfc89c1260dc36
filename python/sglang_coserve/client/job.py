"""A file of requests as one batch: begun or found, followed to its end, its results fetched."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final
from uuid import uuid4

from sglang_coserve.client.batch_api import FINAL_STATUSES, Batch, BatchApi
from sglang_coserve.client.calls import RefusedError
from sglang_coserve.client.options import BatchOptions
from sglang_coserve.client.output_files import cut_unsynced, errors_path
from sglang_coserve.client.progress import JobState, JobStatus, showing
from sglang_coserve.client.submission import (
    Submission,
    SubmissionFile,
    file_digest,
    submission_path,
)
from sglang_coserve.errors import (
    ConfigError,
    CoserveError,
    InputFileError,
    RequestError,
    ServerError,
)
from sglang_coserve.jsonl.lines import read_lines
from sglang_coserve.lines.background import to_its_end

_GONE: Final = "file_not_found"
_OTHER_OPTIONS: Final = "idempotency_conflict"
"""Codes of errors."""

_FIRST_POLL_S: Final = 0.05
_MAX_POLL_S: Final = 2.0
_MAX_SHOWN_FAULTS: Final = 5
_DEFAULT_ENDPOINT: Final = "/v1/chat/completions"


class AsyncJob:
    """A submitted file. It runs on its own, whether or not anybody waits for it.

    Stopping it ends nothing that a later job could not continue.
    """

    def __init__(
        self,
        source: Path,
        output: Path,
        opened: AbstractAsyncContextManager[BatchApi],
        batch_options: BatchOptions,
        *,
        is_local: bool,
    ) -> None:
        """Start the job. ``opened`` is entered while the batch runs.

        Raises:
            InputFileError: another client has the output.
        """
        self.output = output
        """Where results go, in OpenAI's batch output format."""

        self.errors = errors_path(output)
        """Where failed lines go; not there when no line failed."""

        self._source = source
        self._opened = opened
        self._batch_options = batch_options
        self._is_local = is_local
        self._submission = SubmissionFile(output)
        self._api: BatchApi | None = None
        self._batch: Batch | None = None
        """The batch at the last look."""

        self._first: Batch | None = None
        """The batch when this job began."""

        self._began_s = time.monotonic()
        self._ended_s: float | None = None
        self._is_stopped = False
        self._task = asyncio.create_task(self._run())

    @property
    def is_running(self) -> bool:
        """True until the job has ended and its files are closed."""
        return not self._task.done()

    @property
    def status(self) -> JobStatus:
        """The progress of the batch at the last look."""
        return JobStatus.of(
            self._state(),
            self._batch,
            self._first,
            elapsed_s=(self._ended_s or time.monotonic()) - self._began_s,
            last_failure=self._api.last_failure if self._api else None,
            is_local=self._is_local,
        )

    async def wait(self, *, progress: bool = False) -> JobStatus:
        """Wait for the end, completed or cancelled, and return the final status.

        Cancelling the wait does not cancel the job.

        Raises:
            InputFileError: the input is malformed, or a file cannot be used.
            ConfigError: the output was begun otherwise, or on another server.
            ServerError: the server is gone, or refuses the API key or the batch; or the batch was
                cancelled.
        """
        await (showing(self.ended(), lambda: self.status) if progress else self.ended())
        return self.outcome()

    @property
    def can_continue(self) -> bool:
        """True if the same submission, once more, would go on where this job has ended."""
        has_other_options = not (self._task.cancelled() or self.is_running) and isinstance(
            self._task.exception(), ConfigError
        )
        return self._submission.can_be_continued and not has_other_options

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

        A batch that the server keeps goes on there: ``batches.cancel`` ends it.
        """
        # Only once: the first cancellation lets it write the answers that it has. Not known from
        # ``Task.cancelling``, which a timeout within the job raises for a moment.
        if not self._is_stopped:
            self._is_stopped = True
            self._task.cancel()

    def _state(self) -> JobState:
        if not self._task.done():
            return JobState.RUNNING
        if self._task.cancelled():
            return JobState.CANCELLED
        return JobState.FAILED if self._task.exception() else JobState.COMPLETED

    async def _run(self) -> None:
        """Begin or find the batch, and fetch all of its records."""
        try:
            digest = await asyncio.to_thread(file_digest, self._source)
            submission = self._submission.load(digest, self._batch_options, is_local=self._is_local)
            self._first = self._batch = submission.ended
            if self._batch is None:
                async with self._opened as self._api:
                    self._batch = await self._follow(self._api, submission)
                if _was_refused(self._batch):
                    self._submission.forget()
                else:
                    ended = replace(submission, batch_id=self._batch["id"], ended=self._batch)
                    self._submission.save(ended)
            check_outcome(self._batch, self._source)
        finally:
            self._ended_s = time.monotonic()
            with closing(self._submission):
                if self._is_local:
                    await asyncio.to_thread(self._submission.clear)

    async def _follow(self, api: BatchApi, submission: Submission) -> Batch:
        """Return the batch at its end, with all its records in the output."""
        self._first = self._batch = batch = await self._begin(api, submission)
        await asyncio.to_thread(cut_unsynced, batch["id"], self.output)
        poll_s = _FIRST_POLL_S
        try:
            while (batch := await self._look(api, batch["id"]))["status"] not in FINAL_STATUSES:
                api.raise_if_given_up(batch)
                await asyncio.sleep(poll_s)
                poll_s = min(2 * poll_s, _MAX_POLL_S)
        except (asyncio.CancelledError, CoserveError):
            if self._is_local:
                await to_its_end(self._stop(api, batch["id"]))
            raise
        await delete_input(api, batch["input_file_id"])
        return batch

    async def _look(self, api: BatchApi, batch_id: str) -> Batch:
        self._batch = batch = await api.retrieve(batch_id)
        await fetch_results(api, batch, self.output)
        return batch

    async def _stop(self, api: BatchApi, batch_id: str) -> None:
        """Fetch the records since the last look: nobody else would before the next job."""
        await api.stop()
        await self._look(api, batch_id)

    async def _begin(self, api: BatchApi, submission: Submission) -> Batch:
        if submission.batch_id is not None:
            try:
                return await api.retrieve(submission.batch_id)
            except RequestError as error:
                raise ConfigError(
                    f"the server does not know {submission.batch_id}, which {self.output} was "
                    f"begun with ({error}): use that server and key, or choose another output"
                ) from error
        try:
            return await begin_batch(
                api, self._source, self._batch_options, submission, self._submission.save
            )
        except RequestError as error:
            if isinstance(error, RefusedError) and error.code == _OTHER_OPTIONS:
                raise ConfigError(
                    f"{self.output} was begun with other options ({error}): use those, or remove"
                    f" {submission_path(self.output)}"
                ) from error
            self._submission.forget()
            raise


async def fetch_results(api: BatchApi, batch: Batch, output: Path) -> None:
    """Append the records of a batch that ``output`` and its error file lack.

    Call ``cut_unsynced`` once before.

    Raises:
        InputFileError: a file cannot be written.
        ServerError: see ``BatchApi``.
    """
    for name, path in ("output_file_id", output), ("error_file_id", errors_path(output)):
        if batch[name] is not None:
            await api.fetch(batch[name], path)


async def begin_batch(
    api: BatchApi,
    source: Path,
    batch_options: BatchOptions,
    submission: Submission,
    save: Callable[[Submission], None],
) -> Batch:
    """Upload ``source`` and begin its batch, from where ``submission`` says it was interrupted.

    What was uploaded is deleted again when the batch is refused.

    Raises:
        InputFileError: ``source`` cannot be read.
        ServerError, RequestError: see ``BatchApi``.
    """
    endpoint = await asyncio.to_thread(_input_endpoint, source)
    file_id = submission.input_file_id
    is_resumed = file_id is not None
    if file_id is None:
        file_id = await api.upload(source)
        submission = replace(submission, input_file_id=file_id)
        save(submission)
    window = batch_options.window or api.default_window
    options = {"priority": batch_options.priority}
    try:
        batch = await api.create(file_id, endpoint, window, submission.idempotency_key, options)
    except RefusedError as error:
        if error.code == _GONE and is_resumed:
            submission = replace(submission, idempotency_key=uuid4().hex, input_file_id=None)
            return await begin_batch(api, source, batch_options, submission, save)
        if error.code != _OTHER_OPTIONS:
            await delete_input(api, file_id)
        raise
    save(replace(submission, batch_id=batch["id"]))
    return batch


async def delete_input(api: BatchApi, file_id: str) -> None:
    """Delete what was uploaded for a batch that needs it no more; if that fails, it expires."""
    with suppress(RequestError, ServerError):
        await api.delete(file_id)


def _input_endpoint(source: Path) -> str:
    """Return the endpoint of the first line; a batch has one for all. Blocks.

    Raises:
        InputFileError: ``source`` cannot be read.
    """
    try:
        with source.open("rb") as file:
            for line in read_lines(file, 1 << 26):
                if line.content is None or line.content.strip():
                    return str(json.loads(line.content or b"{}")["url"])
    except OSError as error:
        raise InputFileError(f"cannot read {source}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, RecursionError):
        pass  # The server says what is wrong with the line.
    return _DEFAULT_ENDPOINT


def _was_refused(batch: Batch) -> bool:
    """Return whether a batch failed before any of its lines was served."""
    counts = batch["request_counts"]
    return batch["status"] == "failed" and not (counts["completed"] or counts["failed"])


def check_outcome(batch: Batch, source: Path | str) -> None:
    """Check that a batch that has ended has a record for every line.

    Raises:
        InputFileError: its input was malformed, or a failing disk kept it from its end.
        ServerError: it was cancelled.
    """
    if batch["status"] == "failed":
        faults = (batch["errors"] or {"data": []})["data"]
        shown = [
            f"  line {fault['line']}: {fault['message']}" if fault["line"] else fault["message"]
            for fault in faults[:_MAX_SHOWN_FAULTS]
        ]
        if len(faults) > _MAX_SHOWN_FAULTS:
            shown.append(f"  and {len(faults) - _MAX_SHOWN_FAULTS} more")
        what = (
            f"{source} is refused:"
            if _was_refused(batch)
            else f"{batch['id']} has failed; what it had finished is here. To begin anew, choose"
            " another output:"
        )
        raise InputFileError("\n".join([what, *shown]))
    if batch["status"] == "cancelled":
        raise ServerError(
            f"{batch['id']} was cancelled; what it had finished is here. To begin anew, choose"
            " another output"
        )
