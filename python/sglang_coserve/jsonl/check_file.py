"""The process that checks a whole batch file, so that the server's interpreter lock stays free.

``python -m sglang_coserve.jsonl.check_file FILE`` prints one JSON object:
``requests``, ``estimated_tokens`` and ``faults`` of ``code``, ``message``, ``line``
and ``param``. A file is good when it has no faults.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

import orjson

from sglang_coserve.jsonl.lines import UTF16_BOMS, FileLine, is_blank, read_lines
from sglang_coserve.jsonl.request_line import BadLineError, estimate_tokens, parse_request_line
from sglang_coserve.jsonl.seen_ids import SeenIds

__all__ = ["CheckLimits", "FileReport", "InputFault", "check_file", "main"]

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """What a batch file may hold."""

    max_lines: int
    """Requests; blank lines are not counted."""

    max_line_bytes: int
    max_faults: int
    """The check ends after this many."""


@dataclass(frozen=True, slots=True)
class InputFault:
    """Why the file cannot be used."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(slots=True)
class FileReport:
    """What a file holds."""

    requests: int = 0
    estimated_tokens: int = 0
    faults: list[InputFault] = field(default_factory=list)


def check_file(file: BinaryIO, endpoint: str, limits: CheckLimits) -> FileReport:
    """Check every line of ``file``, from its beginning, in bounded memory."""
    report = FileReport()
    if file.read(2) in UTF16_BOMS:
        report.faults.append(InputFault("invalid_utf8", "the file is UTF-16: save it as UTF-8"))
        return report
    file.seek(0)
    seen = SeenIds()
    for line in read_lines(file, limits.max_line_bytes):
        if is_blank(line.content):
            continue
        report.requests += 1
        if report.requests > limits.max_lines:
            message = f"more than {limits.max_lines:,} requests: split the file"
            report.faults.append(InputFault("too_many_requests", message))
            break
        try:
            report.estimated_tokens += _check_line(line, endpoint, limits, seen)
        except BadLineError as error:
            report.faults.append(InputFault(error.code, str(error), line.number, error.param))
            if len(report.faults) >= limits.max_faults:
                message = f"only the first {limits.max_faults} faults are listed"
                report.faults.append(InputFault("too_many_errors", message))
                break
    if not report.requests:
        report.faults.append(InputFault("empty_file", "the file has no requests"))
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the file named on the command line and print the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--max-lines", type=int, required=True)
    parser.add_argument("--max-line-bytes", type=int, required=True)
    parser.add_argument("--max-faults", type=int, required=True)
    given = parser.parse_args(arguments)
    os.nice(10)  # Whatever serves requests is more urgent; with 19 a busy host never gets here.
    limits = CheckLimits(given.max_lines, given.max_line_bytes, given.max_faults)
    with given.file.open("rb", buffering=_READ_BYTES) as file:
        report = check_file(file, given.endpoint, limits)
    sys.stdout.buffer.write(orjson.dumps(asdict(report)))


if __name__ == "__main__":
    main()
