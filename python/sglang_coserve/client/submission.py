"""Which batch fills an output: stored beside the output, before the batch is created.

For ``a.jsonl`` the submission is in ``a.batch.json``. A batch that the client keeps itself is in
the directory ``a.jsonl.coserve`` until it has ended, and in ``a.jsonl.coserve.removed`` while it is
being deleted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self
from uuid import uuid4

import msgspec

from sglang_coserve.client.batch_api import Batch
from sglang_coserve.client.options import BatchOptions
from sglang_coserve.client.output_files import errors_path, locked
from sglang_coserve.durable_files import replace as replace_file
from sglang_coserve.errors import ConfigError, InputFileError


@dataclass(frozen=True, slots=True)
class Submission:
    """A batch and its input."""

    input_digest: str
    idempotency_key: str
    input_file_id: str | None = None
    batch_id: str | None = None

    is_local: bool = False
    """Whether the client keeps the batch; else the server does."""

    ended: Batch | None = None
    """The batch at its end, once all its results are in the output."""

    batch_options: BatchOptions | None = None
    """None where an earlier version has begun the batch."""

    @classmethod
    def new(
        cls,
        input_digest: str = "",
        batch_options: BatchOptions | None = None,
        *,
        is_local: bool = False,
    ) -> Self:
        """Return a submission for a batch that nobody has begun."""
        return cls(input_digest, uuid4().hex, is_local=is_local, batch_options=batch_options)


def submission_path(output: Path) -> Path:
    """Return where the submission of ``output`` is: ``a.jsonl`` → ``a.batch.json``."""
    return output.with_name(output.name.removesuffix(".jsonl") + ".batch.json")


def data_directory(output: Path) -> Path:
    """Return where the client keeps the batch of ``output``: ``a.jsonl`` → ``a.jsonl.coserve``."""
    return output.with_name(output.name + ".coserve")


def read_submission(output: Path) -> Submission | None:
    """Return the submission of ``output``; None for an output that has none.

    Raises:
        InputFileError: the file is not one of ours, or cannot be read.
    """
    path = submission_path(output)
    try:
        # Older versions added a line for each change.
        return msgspec.json.decode(path.read_bytes().splitlines()[-1], type=Submission)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputFileError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, LookupError):
        raise InputFileError(f"{path} is not from coserve submit: remove it") from None


def file_digest(path: Path) -> str:
    """Return a digest of a whole file. Blocks.

    Raises:
        InputFileError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()
    except OSError as error:
        raise InputFileError(f"cannot read {path}: {error.strerror}") from error


class SubmissionFile:
    """The submission of an output, which nobody else may fill until this is closed."""

    def __init__(self, output: Path) -> None:
        """Lock the output, which is made if need be.

        Raises:
            InputFileError: another client has the output, or the output cannot be written.
        """
        self._output = output
        self._path = submission_path(output)
        self._directory = data_directory(output)
        self._current: Submission | None = None
        """The submission on the disk; None unless ``load`` has accepted it."""

        self._is_forgotten = False
        self._lock = ExitStack()
        self._lock.enter_context(locked(output))

    def close(self) -> None:
        """Unlock the output."""
        self._lock.close()

    @property
    def can_be_continued(self) -> bool:
        """True while there is a submission that has not ended."""
        return self._current is not None and self._current.ended is None

    def load(self, input_digest: str, batch_options: BatchOptions, *, is_local: bool) -> Submission:
        """Return the submission; a new one for an output that has none, or whose files are gone.

        Raises:
            InputFileError: the submission is not one of ours, or belongs to another input; the
                output holds something else.
            ConfigError: the batch was begun at the other place, or with other options.
        """
        found = read_submission(self._output)
        if found is not None and found.ended and not self._has_results(found.ended):
            found = replace(found, ended=None)
        if found is None or (found.is_local and not found.ended and not self._directory.exists()):
            return self._new(Submission.new(input_digest, batch_options, is_local=is_local))
        if found.is_local != is_local:
            place = "by this client (--no-batch)" if found.is_local else "by the server"
            raise ConfigError(
                f"{self._output} is filled by a batch that is kept {place}: continue it so, or"
                " choose another output"
            )
        if found.input_digest != input_digest:
            raise InputFileError(
                f"the input has changed since {self._output} was begun:"
                " choose another output, or move this one and its .batch.json away"
            )
        if found.batch_options not in (None, batch_options):
            raise ConfigError(
                f"{self._output} was begun with {found.batch_options}, and this is"
                f" {batch_options}: give the same again, or choose another output"
            )
        self._current = found
        return found

    def save(self, submission: Submission) -> None:
        """Write ``submission`` to the disk.

        Raises:
            InputFileError: the file cannot be written.
        """
        content = json.dumps(asdict(submission)).encode()
        try:
            replace_file(self._path, lambda file: file.write(content), 0o666)
        except OSError as error:
            raise InputFileError(f"cannot write {self._path}: {error.strerror}") from error
        self._current = submission

    def forget(self) -> None:
        """Forget the batch: another input may follow."""
        self._path.unlink(missing_ok=True)
        self._current, self._is_forgotten = None, True

    def clear(self) -> None:
        """Delete what the client has kept of a batch that has ended or was forgotten. Blocks.

        What cannot be deleted is deleted by the next client.
        """
        if self._is_forgotten or (self._current and self._current.ended):
            with suppress(OSError):
                self._remove_directory()

    def _remove_directory(self) -> None:
        # By another name: what a killed client leaves is no batch.
        removed = self._directory.with_name(f"{self._directory.name}.removed")
        shutil.rmtree(removed, ignore_errors=True)
        with suppress(FileNotFoundError):
            self._directory.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    def _new(self, submission: Submission) -> Submission:
        for path in (self._output, errors_path(self._output)):
            if path.exists() and path.stat().st_size:
                raise InputFileError(
                    f"{path} is not empty, and no batch is known that fills it: choose another"
                    " output, or move this file away. (An earlier version that sent lines one by"
                    " one may have made it: submit the lines without a result on their own)"
                )
        if submission.is_local:
            if self._directory.exists() and not (self._directory / "lock").exists():
                raise InputFileError(
                    f"{self._directory} is not from coserve submit: choose another output"
                )
            try:
                self._remove_directory()  # No submission names the batch in it.
            except OSError as error:
                raise InputFileError(
                    f"cannot remove {self._directory}: {error.strerror}; choose another output"
                ) from error
            self.save(submission)  # Before the directory is there.
        return submission

    def _has_results(self, ended: Batch) -> bool:
        counts = ended["request_counts"]
        files = (self._output, counts["completed"]), (errors_path(self._output), counts["failed"])
        return all(path.exists() and path.stat().st_size for path, lines in files if lines)
