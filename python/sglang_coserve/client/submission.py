"""Stores beside an output which batch of a server fills it.

Whatever is added to the file is a line of JSON, and the last one counts. So a crash that tears it
leaves the one before, with which the same batch is found: it is stored before the batch is created.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, Self
from uuid import uuid4

import msgspec

from sglang_coserve.client.output_files import lock_output
from sglang_coserve.durable_files import append, settle, sync_names, unlock_file
from sglang_coserve.errors import InputFileError

_START: Final = b'{"input_digest": "'
_MOST_BYTES: Final = 1 << 16
"""A batch takes two lines of 200 bytes."""


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
        self._fd: int | None = None
        self._size_bytes = 0

    def open(self) -> None:
        """Open the file, making it when it is not there, and lock it.

        Raises:
            InputFileError: another client has it, or it cannot be written.
        """
        self._fd = lock_output(self._output, self._path)

    def close(self) -> None:
        """Unlock the output."""
        if self._fd is not None:
            unlock_file(self._fd)
            self._fd = None

    def remove(self) -> None:
        """Forget the batch."""
        self._path.unlink(missing_ok=True)

    def load(self, input_digest: str) -> Submission:
        """Return the submission, or a new one for an output that has none.

        Raises:
            InputFileError: it is not one of ours, or belongs to another input.
        """
        assert self._fd is not None, "load() before open()"
        content = os.pread(self._fd, _MOST_BYTES, 0)
        submission, self._size_bytes = None, 0
        # Zeros are what a power failure leaves of bytes that were not synced.
        for line in content.partition(b"\0")[0].splitlines(keepends=True):
            try:
                if line.strip():
                    submission = msgspec.json.decode(line, type=Submission)
            except ValueError:
                break
            self._size_bytes += len(line)
        if submission is None and not _is_torn(content):
            raise InputFileError(f"{self._path} is not from coserve submit: remove it")
        with _writing(self._path):
            settle(self._path, self._size_bytes, 0)
        if submission is None:
            return Submission.new(input_digest)
        if submission.input_digest != input_digest:
            raise InputFileError(
                f"the input has changed since {self._output} was begun:"
                " choose another output, or move this one and its .batch.json away"
            )
        return submission

    def save(self, submission: Submission) -> None:
        """Write ``submission`` to the disk, after ``load``.

        Raises:
            InputFileError: it cannot be written.
        """
        assert self._fd is not None, "save() before open()"
        # Older versions ended their only line without a line ending.
        text = b"\n" * bool(self._size_bytes) + json.dumps(asdict(submission)).encode()
        with _writing(self._path):
            os.lseek(self._fd, self._size_bytes, os.SEEK_SET)
            append(self._fd, text, self._size_bytes)
            if not self._size_bytes:
                sync_names(self._path.parent)
        self._size_bytes += len(text)


def _is_torn(content: bytes) -> bool:
    """Return whether this is what a crash can leave of the first line."""
    return all(found in (0, expected) for found, expected in zip(content, _START, strict=False))


@contextmanager
def _writing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise InputFileError(f"cannot write {path}: {error.strerror}") from error
