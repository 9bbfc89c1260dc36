"""What a submission must remember of its batch, beside the output it will fill."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Self
from uuid import uuid4

from sglang_coserve.errors import InputFileError

__all__ = ["BatchTicket", "TicketFile", "file_digest", "ticket_path"]


@dataclass(frozen=True, slots=True)
class BatchTicket:
    """One batch, from before it exists."""

    input_digest: str
    idempotency_key: str
    input_file_id: str | None = None
    batch_id: str | None = None

    @classmethod
    def new(cls, input_digest: str = "") -> Self:
        """Return a ticket for a batch that nobody has begun."""
        return cls(input_digest, uuid4().hex)


def ticket_path(output: Path) -> Path:
    """Return where the ticket of ``output`` is: ``a.jsonl`` → ``a.batch.json``."""
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


class TicketFile:
    """The ticket of an output, which nobody else may fill while this is open."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._path = ticket_path(output)
        self._fd: int | None = None

    def open(self) -> None:
        """Open the file, making it when it is not there, and lock it.

        Raises:
            InputFileError: another client has it, or it cannot be written.
        """
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise InputFileError(
                f"{self._output} is being written by another client:"
                " wait for it to end, or choose another output"
            ) from error
        except OSError as error:
            self.close()
            raise InputFileError(f"cannot write {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Let others have the output."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def remove(self) -> None:
        """Forget the batch."""
        self._path.unlink(missing_ok=True)

    def load(self, input_digest: str) -> BatchTicket:
        """Return the ticket, or a new one for an output that has none.

        Raises:
            InputFileError: it is not one of ours, or belongs to another input.
        """
        assert self._fd is not None, "load() before open()"
        text = os.pread(self._fd, 1 << 16, 0)
        if not text:
            return BatchTicket.new(input_digest)
        try:
            ticket = BatchTicket(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise InputFileError(f"{self._path} is no ticket of ours: remove it") from error
        if ticket.input_digest != input_digest:
            raise InputFileError(
                f"the input has changed since {self._output} was begun:"
                " choose another output, or move this one and its .batch.json away"
            )
        return ticket

    def save(self, ticket: BatchTicket) -> None:
        """Keep ``ticket``, on the disk."""
        assert self._fd is not None, "save() before open()"
        text = json.dumps(asdict(ticket)).encode()
        # Only ever longer than what it replaces.
        os.pwrite(self._fd, text, 0)
        os.ftruncate(self._fd, len(text))
        os.fsync(self._fd)
