"""The process that reads a batch file, so that the server's interpreter lock stays free.

``python -m sglang_coserve.jsonl.check_file FILE ENDPOINT LIMITS``, with ``CheckLimits`` in JSON,
checks the whole of it and prints one JSON object: ``requests``, ``estimated_tokens`` and ``faults``
of ``code``, ``message``, ``line`` and ``param``. A file is good when it has no faults. With an
offset in bytes in place of ``LIMITS`` it prints the ``custom_id`` of the line that begins there,
which has been checked before, and is too large to be parsed in the server.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

import orjson

from sglang_coserve.jsonl.lines import UTF16_BOMS, FileLine, is_blank, read_lines
from sglang_coserve.jsonl.request_line import BadLineError, estimate_tokens, parse_request_line
from sglang_coserve.jsonl.seen_ids import SeenIds

__all__ = ["CheckLimits", "FileReport", "LineFault", "check_file", "main"]

_READ_BYTES = 1 << 20
_UTF8_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """What a batch file may hold."""

    max_lines: int
    """Requests; blank lines are not counted."""

    max_line_bytes: int
    max_faults: int
    """The check ends after this many."""


@dataclass(frozen=True, slots=True)
class LineFault:
    """Why a batch failed, or its file cannot be used."""

    code: str
    message: str

    line: int | None = None
    """1-based line number in the input; None when it is the file as a whole."""

    param: str | None = None


@dataclass(slots=True)
class FileReport:
    """What a file holds."""

    requests: int = 0
    estimated_tokens: int = 0
    faults: list[LineFault] = field(default_factory=list)


def check_file(file: BinaryIO, endpoint: str, limits: CheckLimits) -> FileReport:
    """Check every line of ``file``, from its beginning, in bounded memory."""
    report = FileReport()
    if file.read(2) in UTF16_BOMS:
        report.faults.append(LineFault("invalid_utf8", "the file is UTF-16: save it as UTF-8"))
        return report
    file.seek(0)
    seen = SeenIds()
    for line in read_lines(file, limits.max_line_bytes):
        if is_blank(line.content):
            continue
        report.requests += 1
        if report.requests > limits.max_lines:
            message = f"more than {limits.max_lines:,} requests: split the file"
            report.faults.append(LineFault("too_many_requests", message))
            break
        try:
            report.estimated_tokens += _check_line(line, endpoint, limits, seen)
        except BadLineError as error:
            report.faults.append(LineFault(error.code, str(error), line.number, error.param))
            if len(report.faults) >= limits.max_faults:
                message = f"only the first {limits.max_faults} faults are listed"
                report.faults.append(LineFault("too_many_errors", message))
                break
    if not report.requests:
        report.faults.append(LineFault("empty_file", "the file has no requests"))
    return report


def _check_line(line: FileLine, endpoint: str, limits: CheckLimits, seen: SeenIds) -> int:
    """Return the estimated tokens of a line, or raise BadLineError."""
    if line.content is None:
        message = f"{line.size_bytes:,} bytes: the limit is {limits.max_line_bytes:,}"
        raise BadLineError("line_too_long", message)
    request = parse_request_line(line.content, endpoint)
    if not seen.add(request.custom_id):
        message = "an earlier line has the same custom_id: make it unique"
        raise BadLineError("duplicate_custom_id", message, "custom_id")
    return estimate_tokens(line.size_bytes, request.body)


def main(path: str, endpoint: str, wanted: str) -> None:
    """Print what is wanted: a report, or the id of a line."""
    os.nice(10)  # Whatever serves requests is more urgent; with 19 a busy host never gets here.
    found: object
    with Path(path).open("rb", buffering=_READ_BYTES) as file:
        if wanted.isdecimal():
            file.seek(int(wanted))
            line = file.readline().removeprefix(_UTF8_BOM).rstrip(b"\r\n")
            found = parse_request_line(line, endpoint).custom_id
        else:
            found = asdict(check_file(file, endpoint, CheckLimits(**orjson.loads(wanted))))
    sys.stdout.buffer.write(orjson.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
