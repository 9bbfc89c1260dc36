"""Results of lines, read from their records in files that may still be growing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from sglang_coserve.client.output_files import errors_path
from sglang_coserve.errors import InputFileError
from sglang_coserve.lines.result_record import error_message, record_identity, usage_of

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
