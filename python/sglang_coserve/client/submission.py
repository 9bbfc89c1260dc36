"""Stores beside an output which batch of a server fills it, before the batch is created: so it is
found again."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Self
from uuid import uuid4

import msgspec

from sglang_coserve.client.output_files import lock_output
from sglang_coserve.durable_files import replace, unlock_file
from sglang_coserve.errors import InputFileError


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
    """The submission of an output, which nobody else may fill while this is open."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._path = submission_path(output)
        self._lock: int | None = None

    def open(self) -> None:
        """Lock the output, which is made if need be.

        Raises:
            InputFileError: another client has it, or it cannot be written.
        """
        self._lock = lock_output(self._output)

    def close(self) -> None:
        """Unlock the output."""
        if self._lock is not None:
            unlock_file(self._lock)
            self._lock = None

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
        content = msgspec.json.encode(submission)
        try:
            replace(self._path, lambda file: file.write(content), 0o666)
        except OSError as error:
            raise InputFileError(f"cannot write {self._path}: {error.strerror}") from error
