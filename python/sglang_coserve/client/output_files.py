"""The output of a batch and the error file beside it: together, one record per line."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from sglang_coserve.durable_files import MAX_UNSYNCED_BYTES, lock_file, sync_names, unlock_file
from sglang_coserve.errors import InputFileError
from sglang_coserve.jsonl.lines import UTF16_BOMS
from sglang_coserve.lines.result_record import (
    RECORD_START,
    error_message,
    record_identity,
    usage_of,
)


def errors_path(output: Path) -> Path:
    """Return where the failed lines of ``output`` go: ``a.jsonl`` → ``a.errors.jsonl``."""
    return output.with_name(output.name.removesuffix(".jsonl") + ".errors.jsonl")


def check_files(source: Path, output: Path) -> None:
    """Check what can be known of an input and an output before a server is called.

    Raises:
        InputFileError: the input cannot be read, or is UTF-16; a file is not a regular one; the
            output would overwrite the input.
    """
    try:
        if source.exists() and not source.is_file():
            raise InputFileError(f"{source} is not a regular file: save the lines to a file first")
        with source.open("rb") as file:
            if file.read(2) in UTF16_BOMS:
                raise InputFileError(f"{source} is UTF-16: save it as UTF-8")
        for path in (output, errors_path(output)):
            if path.exists() and not path.is_file():
                raise InputFileError(f"{path} is not a regular file: choose another output")
            if path.exists() and path.samefile(source):
                raise InputFileError(f"{path} would overwrite the input: choose another output")
    except OSError as error:
        raise InputFileError(f"cannot read {source}: {error.strerror}") from error


@contextmanager
def locked(output: Path) -> Generator[None]:
    """Keep other clients from ``output``, which is made if need be, until the context ends.

    Raises:
        InputFileError: another client has it, or it cannot be written.
    """
    _check_alone(output)  # Before the output is made, which would be in the way of its twin.
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
