"""The output of a batch and the error file beside it: together, one record per line."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from sglang_coserve.durable_files import (
    MAX_UNSYNCED_BYTES,
    append,
    lock_file,
    sync_names,
    unlock_file,
)
from sglang_coserve.errors import InputFileError, ServerError
from sglang_coserve.jsonl.lines import UTF16_BOMS
from sglang_coserve.lines.background import to_its_end
from sglang_coserve.lines.result_record import (
    RECORD_START,
    error_message,
    record_identity,
    usage_of,
)

_READ_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 1 << 20
"""So much of a file is written and synced at once."""


def errors_path(output: Path) -> Path:
    """Return where the failed lines of ``output`` go: ``a.jsonl`` → ``a.errors.jsonl``."""
    return output.with_name(output.name.removesuffix(".jsonl") + ".errors.jsonl")


def open_input(path: Path) -> BinaryIO:
    """Open a batch file for reading.

    Raises:
        InputFileError: it cannot be read, is not a regular file (a resumed run
            reads it again, so a pipe will not do), or is UTF-16.
    """
    if path.exists() and not path.is_file():
        raise InputFileError(f"{path} is not a regular file: save the lines to a file first")
    try:
        file = path.open("rb", buffering=_READ_BYTES)
    except OSError as error:
        raise InputFileError(f"cannot read {path}: {error.strerror}") from error
    if file.read(2) in UTF16_BOMS:
        file.close()
        raise InputFileError(f"{path} is UTF-16: save it as UTF-8")
    file.seek(0)
    return file


@contextmanager
def locked(output: Path) -> Generator[None]:
    """Keep other clients from ``output``, which is made if need be, until the context ends.

    Raises:
        InputFileError: another client has it, or it cannot be written.
    """
    if output.exists() and not output.is_file():
        raise InputFileError(f"{output} is not a regular file: choose another output")
    try:
        lock = lock_file(output, 0o666)
    except BlockingIOError as error:
        raise InputFileError(
            f"{output} is being written by another client:"
            " wait for it to end, or choose another output"
        ) from error
    except OSError as error:
        raise InputFileError(f"cannot write {output}: {error.strerror}") from error
    try:
        _check_alone(output)
        yield
    finally:
        unlock_file(lock)


def _check_alone(output: Path) -> None:
    """Refuse an output beside one that has the same error file: ``a`` beside ``a.jsonl``."""
    stem = output.name.removesuffix(".jsonl")
    twin = output.with_name(stem if stem != output.name else f"{stem}.jsonl")
    try:
        with twin.open("rb") as file:
            is_output = file.read(len(RECORD_START)) in (b"", RECORD_START)
    except OSError:
        return
    if is_output:
        raise InputFileError(
            f"failed lines of {output} and of {twin} would go to the same file,"
            f" {errors_path(output)}: choose another output"
        )


class GrowingFile:
    """A file that bytes are appended to, forced to the disk in pieces."""

    def __init__(self, path: Path, fd: int) -> None:
        """Made by ``growing``."""
        self._path = path
        self._fd = fd
        self._unwritten = bytearray()
        self.size_bytes = os.fstat(fd).st_size
        """With what is still to be written."""

    async def append(self, content: bytes) -> None:
        """Append ``content``; it is on the disk when the context of the file has ended."""
        self._unwritten += content
        self.size_bytes += len(content)
        if len(self._unwritten) >= _PIECE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write what is not yet on the disk; on an OSError that is given up."""
        piece, self._unwritten = bytes(self._unwritten), bytearray()
        if piece:
            written_bytes = self.size_bytes - len(piece)
            await to_its_end(asyncio.to_thread(append, self._fd, piece, written_bytes))

    def raise_if_longer(self, whole_bytes: int | None) -> None:
        """Raise if the file has more than there is: then it was made from something else.

        Raises:
            ServerError: it has.
        """
        if whole_bytes is not None and self.size_bytes > whole_bytes:
            raise ServerError(
                f"{self._path} has {self.size_bytes:,} bytes, and the batch's file only"
                f" {whole_bytes:,}: another server, or an older state of it; choose another output"
            )


@asynccontextmanager
async def growing(path: Path) -> AsyncGenerator[GrowingFile]:
    """Open a file, which is made if need be, to append to it.

    Raises:
        InputFileError: it cannot be written.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            file = GrowingFile(path, fd)
            is_new = not file.size_bytes
            try:
                yield file
            finally:
                await file.flush()
        finally:
            os.close(fd)
        if is_new and file.size_bytes:
            await asyncio.to_thread(sync_names, path.parent)
    except OSError as error:
        raise InputFileError(f"cannot write {path}: {error.strerror}") from error


def cut_unsynced(batch_id: str, output: Path) -> None:
    """Cut off what a crash may have damaged at the ends of ``output`` and its error file. Blocks.

    These bytes, 4 MiB of each file at the most, are fetched again.

    Raises:
        InputFileError: a file cannot be used, or holds something else than results of the batch.
    """
    start = RECORD_START + batch_id.removeprefix("batch_").encode() + b"_"
    for path in (output, errors_path(output)):
        try:
            with path.open("r+b") as file:
                found = file.read(len(start))
                # A power failure leaves zeros where bytes were not synced.
                if any(byte not in (0, ours) for byte, ours in zip(found, start, strict=False)):
                    raise InputFileError(
                        f"{path} holds something else than results of {batch_id}: choose another"
                        " output, or move this file away"
                    )
                size_bytes = file.seek(0, os.SEEK_END)
                file.truncate(max(0, size_bytes - MAX_UNSYNCED_BYTES))
            sync_names(path.parent)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise InputFileError(f"cannot write {path}: {error.strerror}") from error


_READ_RECORDS: Final = 256


@dataclass(frozen=True, slots=True)
class Response:
    """The server's answer to one line."""

    status_code: int
    request_id: str
    body: Any
    """Parsed JSON; the text itself when it is not JSON."""


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a line has no result."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of one line of the input."""

    line: int
    """1-based line number in the input."""

    custom_id: str | None
    """None when the line has no usable one."""

    response: Response | None = None
    """None when the server never answered, or was never asked."""

    error: LineError | None = None

    @property
    def ok(self) -> bool:
        """True when the line was served."""
        return self.error is None

    @property
    def text(self) -> str | None:
        """The first choice's text; None for a failed line, an embedding, or a tool call."""
        if not self.ok or self.response is None:
            return None
        match self.response.body:
            case {"choices": [{"message": {"content": str(text)}}, *_]}:
                return text
            case {"choices": [{"text": str(text)}, *_]}:
                return text
        return None

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens the server counted; 0 when it did not."""
        return usage_of(self.response and self.response.body).input_tokens

    @property
    def completion_tokens(self) -> int:
        """Generated tokens the server counted; 0 when it did not."""
        return usage_of(self.response and self.response.body).output_tokens


def decode_record(record: bytes) -> BatchResult:
    """Return the result in a record of a batch, whoever wrote it.

    Raises:
        ValueError: ``record`` is none.
    """
    identity = record_identity(record)
    if identity is None:
        raise ValueError("not a record of a batch run")
    fields = json.loads(record)
    response = msgspec.convert(fields["response"], Response | None)
    error = msgspec.convert(fields["error"], LineError | None)
    if error is None and response and response.status_code not in range(200, 300):
        # A record has no error of its own where the answer has one.
        error = LineError(f"http_{response.status_code}", error_message(response.body))
    return BatchResult(identity[1], fields["custom_id"], response, error)


class ResultStream:
    """The records of an output and its error file, each of them once, as they appear."""

    def __init__(self, output: Path) -> None:
        self._offsets = {output: 0, errors_path(output): 0}

    def read_new(self) -> list[BatchResult]:
        """Return some of the whole records not returned before, or [] when there are none.

        Raises:
            InputFileError: a line is no record.
        """
        results: list[BatchResult] = []
        for path, offset in self._offsets.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(offset)
                for record in file:
                    if len(results) >= _READ_RECORDS or not record.endswith(b"\n"):
                        break
                    results.append(_decode(path, record))
                    self._offsets[path] += len(record)
        return results


def read_results(output: str | Path) -> Iterator[BatchResult]:
    """Yield every result in ``output`` and its error file, in no particular order.

    An unfinished record at the end of a file is left out.

    Raises:
        InputFileError: there is no such file, or a line of it is no record.
    """
    path = Path(output)
    if not path.is_file():
        raise InputFileError(f"{path} is not there: submit a batch with this output first")
    stream = ResultStream(path)
    while results := stream.read_new():
        yield from results


def _decode(path: Path, record: bytes) -> BatchResult:
    try:
        return decode_record(record)
    except ValueError as error:
        raise InputFileError(f"{path}: {error}: {record[:60]!r}") from error
