"""Follows a batch to its end, and fetches its results as they come, wherever it is kept."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from sglang_coserve.client.batches import FINAL_STATUSES, Batch, Batches
from sglang_coserve.client.calls import RefusedError
from sglang_coserve.client.options import BatchOptions
from sglang_coserve.client.output_files import cut_unsynced, errors_path
from sglang_coserve.client.progress import JobState, JobStatus
from sglang_coserve.client.submission import (
    Submission,
    SubmissionFile,
    file_digest,
    submission_path,
)
from sglang_coserve.errors import ConfigError, InputFileError, RequestError, ServerError
from sglang_coserve.jsonl.lines import read_lines
from sglang_coserve.lines.background import to_its_end

_GONE: Final = "file_not_found"
_OTHER_OPTIONS: Final = "idempotency_conflict"
"""Codes of errors."""

_FIRST_POLL_S: Final = 0.05
_MAX_POLL_S: Final = 2.0
_MAX_SHOWN_FAULTS: Final = 5
_DEFAULT_ENDPOINT: Final = "/v1/chat/completions"
_ENDPOINT_CHARS: Final = 64
"""As much of a url as a batch can be created with."""


class BatchJob:
    """One batch as a job: stopping the job ends nothing that a later one could not continue."""

    def __init__(
        self,
        source: Path,
        output: Path,
        batches: AbstractAsyncContextManager[Batches],
        batch_options: BatchOptions,
        *,
        is_local: bool,
    ) -> None:
        """Lock ``output`` until the job ends. ``batches`` is entered while it runs.

        Raises:
            InputFileError: another client has the output, or it would overwrite the input.
        """
        for path in (output, errors_path(output)):
            if path.exists() and path.samefile(source):
                raise InputFileError(f"{path} would overwrite the input: choose another output")
        self._source = source
        self._output = output
        self._opened = batches
        self._batch_options = batch_options
        self._is_local = is_local
        self._total_bytes = source.stat().st_size
        self._submission = SubmissionFile(output)
        self._batches: Batches | None = None
        self._first: Batch | None = None
        """The batch as it was when this job began."""

        self._batch: Batch | None = None
        self._began_s = time.monotonic()
        self._ended_s: float | None = None

    def status(self, state: JobState) -> JobStatus:
        """Return the progress of the batch as it was last looked at."""
        elapsed_s = (self._ended_s or time.monotonic()) - self._began_s
        status = batch_status(self._batch, state, self._total_bytes, elapsed_s, self._first)
        if self._batches and state is JobState.RUNNING and self._batches.last_failure:
            status = replace(status, trouble=self._batches.last_failure)
        return replace(status, is_local=self._is_local)

    async def run(self) -> None:
        """Begin or find the batch, and fetch all of its records.

        Raises:
            InputFileError: the input is malformed, or a file cannot be used.
            ConfigError: the output was begun otherwise.
            ServerError: the server is gone, or refuses the batch; or the batch was cancelled.
        """
        try:
            digest = await asyncio.to_thread(file_digest, self._source)
            submission = self._submission.load(digest, is_local=self._is_local)
            self._first = self._batch = submission.ended
            if self._batch is None:
                async with self._opened as self._batches:
                    self._batch = await self._follow(self._batches, submission)
                self._remember(submission, self._batch)
            if self._is_local:
                await asyncio.to_thread(self._submission.remove_directory)
            check_outcome(self._batch, self._source)
        finally:
            self._ended_s = time.monotonic()
            self._submission.close()

    async def _follow(self, batches: Batches, submission: Submission) -> Batch:
        """Return the batch at its end, with all its records in the output."""
        self._first = self._batch = batch = await self._begin(batches, submission)
        await asyncio.to_thread(cut_unsynced, batch["id"], self._output)
        poll_s = _FIRST_POLL_S
        try:
            while (batch := await self._look(batches, batch["id"]))["status"] not in FINAL_STATUSES:
                await batches.wait(poll_s)
                poll_s = min(2 * poll_s, _MAX_POLL_S)
        except (asyncio.CancelledError, ServerError):
            if self._is_local:
                await to_its_end(self._stop(batches, batch["id"]))
            raise
        await delete_input(batches, batch["input_file_id"])
        return batch

    async def _stop(self, batches: Batches, batch_id: str) -> None:
        """Bring what was finished since the last look: nobody else would before the next job."""
        await batches.stop()
        await self._look(batches, batch_id)

    def _remember(self, submission: Submission, batch: Batch) -> None:
        """Note that the batch has ended, and all of its results are in the output."""
        if batch["status"] == "failed":  # It served nothing: another input begins another batch.
            self._submission.remove()
        else:
            ended = replace(submission, batch_id=batch["id"], ended=dict(batch))
            self._submission.save(ended)

    async def _look(self, batches: Batches, batch_id: str) -> Batch:
        self._batch = batch = await batches.retrieve(batch_id)
        await fetch_results(batches, batch, self._output)
        return batch

    async def _begin(self, batches: Batches, submission: Submission) -> Batch:
        if submission.batch_id is not None:
            try:
                return await batches.retrieve(submission.batch_id)
            except RequestError as error:
                raise ServerError(
                    f"the server does not know {submission.batch_id}, which {self._output} was "
                    f"begun with ({error}): use that server and key, or choose another output"
                ) from error
        try:
            return await begin_batch(
                batches, self._source, self._batch_options, submission, self._submission.save
            )
        except RequestError as error:
            if isinstance(error, RefusedError) and error.code == _OTHER_OPTIONS:
                raise ConfigError(
                    f"{self._output} was begun with other options ({error}): use those, or remove"
                    f" {submission_path(self._output)}"
                ) from error
            # There is nothing to continue: the input may change, and the server.
            self._submission.remove()
            raise


async def fetch_results(batches: Batches, batch: Batch, output: Path) -> None:
    """Append the records of a batch that ``output`` and its error file lack.

    Call ``cut_unsynced`` once before.

    Raises:
        InputFileError: a file cannot be written.
        ServerError: see ``Batches``.
    """
    for name, path in ("output_file_id", output), ("error_file_id", errors_path(output)):
        if batch[name] is not None:
            await batches.fetch(batch[name], path)


async def begin_batch(
    batches: Batches,
    source: Path,
    batch_options: BatchOptions,
    submission: Submission,
    save: Callable[[Submission], None],
) -> Batch:
    """Upload ``source`` and begin its batch, from where ``submission`` says it was interrupted.

    What was uploaded is deleted again when the batch is refused.

    Raises:
        InputFileError: ``source`` cannot be read.
        ServerError, RequestError: see ``Batches``.
    """
    endpoint = await asyncio.to_thread(_input_endpoint, source)
    file_id = submission.input_file_id
    is_resumed = file_id is not None
    if file_id is None:
        file_id = await batches.upload(source)
        submission = replace(submission, input_file_id=file_id)
        save(submission)
    window = batch_options.window or batches.default_window
    options = {"priority": batch_options.priority}
    try:
        batch = await batches.create(file_id, endpoint, window, submission.idempotency_key, options)
    except RefusedError as error:
        if error.code == _GONE and is_resumed:
            submission = replace(submission, idempotency_key=uuid4().hex, input_file_id=None)
            return await begin_batch(batches, source, batch_options, submission, save)
        if error.code != _OTHER_OPTIONS:
            await delete_input(batches, file_id)
        raise
    save(replace(submission, batch_id=batch["id"]))
    return batch


async def delete_input(batches: Batches, file_id: str) -> None:
    """Delete what was uploaded for a batch that needs it no more; if that fails, it expires."""
    with suppress(RequestError, ServerError):
        await batches.delete(file_id)


def _input_endpoint(source: Path) -> str:
    """Return the endpoint of the first line; a batch has one for all. Blocks.

    Raises:
        InputFileError: ``source`` cannot be read.
    """
    try:
        with source.open("rb") as file:
            for line in read_lines(file, 1 << 26):
                if line.content is None or line.content.strip():
                    return str(json.loads(line.content or b"{}")["url"])[:_ENDPOINT_CHARS]
    except OSError as error:
        raise InputFileError(f"cannot read {source}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, RecursionError):
        pass  # The server says what is wrong with the line.
    return _DEFAULT_ENDPOINT


def check_outcome(batch: Batch, source: Path | str) -> None:
    """Check that a batch that has ended has a record for every line.

    Raises:
        InputFileError: its input was malformed.
        ServerError: it was cancelled.
    """
    if batch["status"] == "failed":
        faults = (batch["errors"] or {"data": []})["data"]
        shown = [
            f"  line {fault['line']}: {fault['message']}" if fault["line"] else fault["message"]
            for fault in faults[:_MAX_SHOWN_FAULTS]
        ]
        more = (
            [f"  and {len(faults) - _MAX_SHOWN_FAULTS} more"]
            if len(faults) > _MAX_SHOWN_FAULTS
            else []
        )
        raise InputFileError("\n".join([f"{source} is refused:", *shown, *more]))
    if batch["status"] == "cancelled":
        raise ServerError(
            f"{batch['id']} was cancelled; what it had finished is here. To begin anew, choose"
            " another output"
        )


def batch_status(
    batch: Batch | None,
    state: JobState,
    total_bytes: int,
    elapsed_s: float,
    first: Batch | None = None,
) -> JobStatus:
    """Return a batch as the status of a job; None is a batch that does not exist yet.

    ``first`` is the batch as it was when the job began.
    """
    counts: dict[str, Any] = batch["request_counts"] if batch else {}
    usage: dict[str, Any] = batch["usage"] if batch else {}
    extra: dict[str, Any] = batch["coserve"] if batch else {}
    before: dict[str, Any] = first["request_counts"] if first else {}
    used: dict[str, Any] = first["usage"] if first else {}
    ok, failed = counts.get("completed", 0), counts.get("failed", 0)
    total = counts.get("total", 0)
    trouble = extra.get("warning") or ("paused" if extra.get("paused") else None)
    return JobStatus(
        state=state,
        ok=ok,
        failed=failed,
        resumed=before.get("completed", 0) + before.get("failed", 0),
        # Lines are what a batch counts.
        done_bytes=total_bytes * (ok + failed) // total if total else 0,
        total_bytes=total_bytes,
        prompt_tokens=usage.get("input_tokens", 0) - used.get("input_tokens", 0),
        completion_tokens=usage.get("output_tokens", 0) - used.get("output_tokens", 0),
        elapsed_s=elapsed_s,
        trouble=trouble if state is JobState.RUNNING else None,
        batch_id=batch["id"] if batch else None,
        batch_state=batch["status"] if batch else None,
        eta_s=extra.get("eta"),
    )
