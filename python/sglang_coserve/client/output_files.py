"""The output of a batch and the error file beside it: together, one record per line."""

from __future__ import annotations

import json
from array import array
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from sglang_coserve.durable_files import lock_file, unlock_file
from sglang_coserve.errors import InputFileError, StorageError
from sglang_coserve.jsonl.lines import UTF16_BOMS, FileLine, read_lines
from sglang_coserve.lines.result_log import ResultLog
from sglang_coserve.lines.result_record import (
    RECORD_START,
    error_message,
    record_identity,
    usage_of,
)

_READ_BYTES = 1 << 20


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


@contextmanager
def file_errors() -> Generator[None]:
    """Raise InputFileError for StorageError: here the files are the user's."""
    try:
        yield
    except StorageError as error:
        raise InputFileError(str(error)) from error


class FinishedLines:
    """Line number to digest, in 8 bytes per line up to the last finished one."""

    def __init__(self) -> None:
        # Indexed by line number; 0 is "no record", which no digest ever is.
        self._digests = array("Q")
        self.size_bytes = 0
        """Bytes of the lines that ``check_unchanged`` found unchanged."""

    def __contains__(self, line: int) -> bool:
        return line < len(self._digests) and self._digests[line] != 0

    def add(self, digest: int, line: int) -> bool:
        """Note that ``line`` is finished; return False when it already was. O(1) amortized."""
        if line in self:
            return False
        if line >= len(self._digests):
            self._digests.frombytes(bytes(8 * (line + 1 - len(self._digests))))
        self._digests[line] = digest
        return True

    def check_unchanged(self, lines: Iterable[FileLine]) -> None:
        """Compare the finished lines with the input.

        Lines that are not finished may change, and lines may be added at the
        end: neither makes a record wrong.

        Raises:
            InputFileError: a finished line is gone or says something else.
        """
        last = len(self._digests) - 1
        number = 0
        if last >= 1:
            for line in lines:
                number = line.number
                if number in self:
                    if self._digests[number] != line.digest:
                        raise InputFileError(
                            f"line {number} of the input has changed since its result was written"
                        )
                    self.size_bytes += line.size_bytes
                if number == last:
                    return
            raise InputFileError(
                f"there is a result for line {last}, but the input ends at line {number}"
            )


class ResultFiles:
    """What a run has written; a later run needs nothing else. The records say which lines are
    finished: the tag of each is its line's digest.
    """

    def __init__(self, output: Path) -> None:
        self.log = ResultLog(output, errors_path(output), mode=0o666)
        self.finished = FinishedLines()
        self._lock = ExitStack()

    def open(self, source: Path, max_line_bytes: int, *, retry_failed: bool = False) -> None:
        """Lock the files and find out which lines of ``source`` are finished.

        Reads everything that was written and, when that is something, the
        input: call it in a thread. With ``retry_failed`` the error records are
        dropped, so their lines are unfinished again. Until every check has
        passed nothing is changed.

        Raises:
            InputFileError: the files are in use, are not ours, or were made
                from another input; see ``ResultLog`` and ``FinishedLines``.
        """
        output = self.log.output
        for path in (output, self.log.errors):
            if path.exists() and path.samefile(source):
                raise InputFileError(f"{path} would overwrite the input: choose another output")
        self._lock.enter_context(locked(output))
        # A line has at least one byte: a number beyond that is from another file,
        # and must not size an array.
        last_possible = source.stat().st_size
        failed = FinishedLines() if retry_failed else self.finished
        try:
            with file_errors():
                self.log.scan(
                    partial(_add, self.finished, last_possible),
                    add_failed=partial(_add, failed, last_possible),
                )
                with open_input(source) as file:
                    self.finished.check_unchanged(
                        read_lines(file, max_line_bytes, with_digest=True)
                    )
                if retry_failed:
                    self.log.drop_errors()
                self.log.cut()
        except InputFileError as error:
            self.close()
            raise InputFileError(
                f"{output} cannot be continued from {source}: {error};"
                " choose another output, or move this one away"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the files for other clients."""
        self._lock.close()


def _add(finished: FinishedLines, last_possible: int, digest: int, line: int) -> bool | None:
    if digest >= 1 << 64:
        return None  # A record of a server's batch.
    if line > last_possible:
        raise InputFileError(f"there is a result for line {line}, which the input does not have")
    return finished.add(digest, line)


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
