"""Follows a batch that the server runs, and downloads its results as they come.

Which batch fills an output is stored beside it, before the batch is created: so it is found again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Self
from uuid import uuid4

import msgspec

from sglang_coserve.client.batch_api import FINAL_STATUSES, Batch, BatchApi
from sglang_coserve.client.calls import RefusedError
from sglang_coserve.client.output_files import errors_path, file_errors, locked
from sglang_coserve.client.progress import JobState, JobStatus
from sglang_coserve.durable_files import replace as replace_file
from sglang_coserve.durations import LONGEST_WINDOW_S, duration_s
from sglang_coserve.errors import ConfigError, InputFileError, RequestError, ServerError
from sglang_coserve.jsonl.lines import read_lines
from sglang_coserve.lines.background import to_its_end
from sglang_coserve.lines.result_log import ResultLog
from sglang_coserve.lines.result_record import batch_tag


@dataclass(frozen=True, slots=True)
class Submission:
    """A batch, stored before it is created."""

    input_digest: str
    idempotency_key: str
    input_file_id: str | None = None
    batch_id: str | None = None

    @classmethod
    def new(cls, input_digest: str = "") -> Self:
        """Return a submission for a batch that nobody has begun."""
        return cls(input_digest, uuid4().hex)


def submission_path(output: Path) -> Path:
    """Return where the submission of ``output`` is: ``a.jsonl`` → ``a.batch.json``."""
    return output.with_name(output.name.removesuffix(".jsonl") + ".batch.json")


def file_digest(path: Path) -> str:
    """Return a digest of a whole file. Blocks.

    Raises:
        InputFileError: it cannot be read.
    """
    digest = blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise InputFileError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


class SubmissionFile:
    """The submission of an output, which nobody else may fill until this is closed."""

    def __init__(self, output: Path) -> None:
        """Lock the output, which is made if need be.

        Raises:
            InputFileError: another client has it, or it cannot be written.
        """
        self._output = output
        self._path = submission_path(output)
        self._lock = ExitStack()
        self._lock.enter_context(locked(output))

    def close(self) -> None:
        """Unlock the output."""
        self._lock.close()

    def remove(self) -> None:
        """Forget the batch."""
        self._path.unlink(missing_ok=True)

    def load(self, input_digest: str) -> Submission:
        """Return the submission, or a new one for an output that has none.

        Raises:
            InputFileError: it is not one of ours, or belongs to another input.
        """
        if not self._path.exists():
            return Submission.new(input_digest)
        try:
            # Older versions added a line for each change.
            submission = msgspec.json.decode(
                self._path.read_bytes().splitlines()[-1], type=Submission
            )
        except OSError as error:
            raise InputFileError(f"cannot read {self._path}: {error.strerror}") from error
        except (ValueError, LookupError):
            raise InputFileError(f"{self._path} is not from coserve submit: remove it") from None
        if submission.input_digest != input_digest:
            raise InputFileError(
                f"the input has changed since {self._output} was begun:"
                " choose another output, or move this one and its .batch.json away"
            )
        return submission

    def save(self, submission: Submission) -> None:
        """Write ``submission`` to the disk.

        Raises:
            InputFileError: it cannot be written.
        """
        content = json.dumps(asdict(submission)).encode()
        try:
            replace_file(self._path, lambda file: file.write(content), 0o666)
        except OSError as error:
            raise InputFileError(f"cannot write {self._path}: {error.strerror}") from error


_GONE: Final = "file_not_found"
_OTHER_OPTIONS: Final = "idempotency_conflict"
"""Codes of errors."""

_FIRST_POLL_S: Final = 0.05
_MAX_POLL_S: Final = 2.0
_MAX_SHOWN_FAULTS: Final = 5
_MOST_PRIORITY: Final = 100
_DEFAULT_ENDPOINT: Final = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How a batch is to be served.

    Raises:
        ConfigError: a value that no server takes.
    """

    window: str = "24h"
    """A duration: ``24h``, ``90m``, ``7d``."""

    priority: int = 0
    """Batches of a higher one go first."""

    def __post_init__(self) -> None:
        # Before anything is uploaded.
        window_s = duration_s(self.window)
        if window_s is None or not 0 < window_s <= LONGEST_WINDOW_S:
            raise ConfigError(
                f"the window {self.window!r} is no duration of up to 366 days: use 24h, 90m, 1h30m"
                " or 7d"
            )
        if not -_MOST_PRIORITY <= self.priority <= _MOST_PRIORITY:
            raise ConfigError(
                f"the priority {self.priority} is not between {-_MOST_PRIORITY} and"
                f" {_MOST_PRIORITY}"
            )


class ServerBatch:
    """One batch of the server's, as a job of ours: stopping the job leaves the batch alone."""

    def __init__(
        self, source: Path, output: Path, api: BatchApi, batch_options: BatchOptions
    ) -> None:
        """Lock ``output`` until the job ends.

        Raises:
            InputFileError: see ``SubmissionFile``.
        """
        self._source = source
        self._output = output
        self._api = api
        self._batch_options = batch_options
        self._total_bytes = source.stat().st_size
        self._submission = SubmissionFile(output)
        self._batch: Batch | None = None
        self._began_s = time.monotonic()
        self._ended_s: float | None = None

    def status(self, state: JobState) -> JobStatus:
        """Return the progress of the batch as the server last reported it."""
        elapsed_s = (self._ended_s or time.monotonic()) - self._began_s
        trouble = self._api.last_failure if state is JobState.RUNNING else None
        return batch_status(self._batch, state, self._total_bytes, elapsed_s, trouble)

    async def run(self) -> None:
        """Begin or find the batch, and download all of its records.

        Raises:
            InputFileError: the server finds the input malformed, or a file cannot be used.
            ServerError: the server is gone, or refuses the batch; or it was cancelled.
        """
        try:
            batch = await self._begin()
            await recover_results(batch["id"], self._output)
            poll_s = _FIRST_POLL_S
            while True:
                self._batch = batch
                await fetch_results(self._api, batch, self._output)
                if batch["status"] in FINAL_STATUSES:
                    break
                await asyncio.sleep(poll_s)
                poll_s = min(2 * poll_s, _MAX_POLL_S)
                batch = await self._api.retrieve(batch["id"])
            await delete_input(self._api, batch["input_file_id"])
            if batch["status"] == "failed":
                self._submission.remove()  # It served nothing: another input begins another one.
            check_outcome(batch, self._source)
        finally:
            self._ended_s = time.monotonic()
            self._submission.close()

    async def _begin(self) -> Batch:
        digest = await asyncio.to_thread(file_digest, self._source)
        submission = self._submission.load(digest)
        if submission.batch_id is not None:
            try:
                return await self._api.retrieve(submission.batch_id)
            except RequestError as error:
                raise ServerError(
                    f"the server does not know {submission.batch_id}, which {self._output} was "
                    f"begun with ({error}): use that server and key, or choose another output"
                ) from error
        try:
            return await begin_batch(
                self._api, self._source, self._batch_options, submission, self._submission.save
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


async def fetch_results(api: BatchApi, batch: Batch, output: Path) -> None:
    """Append the records of a batch that ``output`` and its error file lack.

    Call ``recover_results`` once before.

    Raises:
        InputFileError: a file cannot be written.
        ServerError: see ``BatchApi``.
    """
    for name, path in ("output_file_id", output), ("error_file_id", errors_path(output)):
        if batch[name] is not None:
            await api.fetch(batch[name], path)


async def recover_results(batch_id: str, output: Path) -> None:
    """Cut off what a crash has left at the end of ``output`` and its error file.

    Raises:
        InputFileError: a file cannot be used, or holds something else than results of the batch.
    """
    log, tag = ResultLog(output, errors_path(output)), batch_tag(batch_id)

    def recover() -> None:
        log.scan(lambda of, _line: of == tag or None)
        log.cut()

    try:
        with file_errors():
            await to_its_end(asyncio.to_thread(recover))
    except InputFileError as error:
        raise InputFileError(f"the results of {batch_id} cannot be fetched: {error}") from error


async def begin_batch(
    api: BatchApi,
    source: Path,
    batch_options: BatchOptions,
    submission: Submission,
    save: Callable[[Submission], None],
) -> Batch:
    """Upload ``source`` and begin its batch, from where ``submission`` says it was interrupted.

    What was uploaded is deleted again when the server refuses the batch.

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
    options = {"priority": batch_options.priority}
    try:
        batch = await api.create(
            file_id, endpoint, batch_options.window, submission.idempotency_key, options
        )
    except RefusedError as error:
        if error.code == _GONE and is_resumed:
            submission = Submission.new(submission.input_digest)
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
        raise InputFileError("\n".join([f"the server refuses {source}:", *shown, *more]))
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
    trouble: str | None,
) -> JobStatus:
    """Return a batch as the status of a job; None is one that does not exist yet."""
    counts: dict[str, Any] = batch["request_counts"] if batch else {}
    usage: dict[str, Any] = batch["usage"] if batch else {}
    extra: dict[str, Any] = batch["coserve"] if batch else {}
    ok, failed = counts.get("completed", 0), counts.get("failed", 0)
    total = counts.get("total", 0)
    if batch and state is JobState.RUNNING:
        trouble = trouble or extra.get("warning") or ("paused" if extra.get("paused") else None)
    return JobStatus(
        state=state,
        ok=ok,
        failed=failed,
        resumed=0,
        # Lines are what the server counts.
        done_bytes=total_bytes * (ok + failed) // total if total else 0,
        total_bytes=total_bytes,
        prompt_tokens=usage.get("input_tokens", 0),
        completion_tokens=usage.get("output_tokens", 0),
        elapsed_s=elapsed_s,
        trouble=trouble,
        batch_id=batch["id"] if batch else None,
        batch_state=batch["status"] if batch else None,
        eta_s=extra.get("eta"),
    )
