"""The process that reads a batch file, so that the server's interpreter lock stays free.

``python -m sglang_coserve.jsonl.check_file FILE ENDPOINT LIMITS ORDER``, with ``CheckLimits`` in
JSON, checks the whole of it and prints a ``FileReport`` in JSON. A file is good when it has no
faults; the order of its lines is then written to ``ORDER`` (``PrefixSorter``), if they are many.
With an offset in bytes in place of ``LIMITS`` it prints the ``custom_id`` of the line that begins
there, which has been checked before, and is too large to be served; null if it is no request.

Data beyond SQLite's caches goes to the folder in the environment variable SQLITE_TMPDIR. Without
the variable no order is made, and the ids stay in memory.

``estimate_file`` runs in the server: an answer at once, whatever the size of the file.
"""

from __future__ import annotations

import mmap
import os
import sys
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final

import orjson

from sglang_coserve.durable_files import replace
from sglang_coserve.jsonl.lines import (
    UTF8_BOM,
    UTF16_BOMS,
    FileLine,
    PrefixSorter,
    SeenIds,
    is_blank,
    read_lines,
)
from sglang_coserve.jsonl.request_line import (
    BadLineError,
    LineTooLargeError,
    RequestLine,
    estimate_tokens,
    line_head,
    not_served,
    parse_request_line,
    served_name,
)

_READ_BYTES = 1 << 20

SCRATCH_VARIABLE: Final = "SQLITE_TMPDIR"
"""The variable of the environment that has SQLite's temporary folder."""


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """What a batch file may hold."""

    max_lines: int
    """Requests; blank lines are not counted."""

    max_line_bytes: int
    """A longer line is not parsed: it gets an error record, and fails alone."""

    max_faults: int
    """The check ends after this many."""

    context_tokens: int
    """Of which no line takes more."""

    max_unordered_lines: int = 0
    """So many stay in the order of the file."""

    model_names: tuple[str, ...] = ()
    """What lines may ask for, see ``model_names``; empty while that is unknown."""


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
    model: str | None = None
    """What the first line asks for, as the server calls it."""

    faults: list[LineFault] = field(default_factory=list)


def check_file(
    file: BinaryIO,
    endpoint: str,
    limits: CheckLimits,
    sorter: PrefixSorter | None = None,
) -> FileReport:
    """Check every line of ``file``, from its beginning, in bounded memory.

    ``sorter`` gets the good lines. Without a sorter the ids are kept in memory.

    Without lines over the limit it may be any stream of bytes.
    """
    report = FileReport()
    if file.read(2) in UTF16_BOMS:
        message = "the file is UTF-16: save it as UTF-8"
        report.faults.append(LineFault("invalid_json_line", message))
        return report
    file.seek(0)
    seen = SeenIds(in_memory=sorter is None)
    for line in read_lines(file, limits.max_line_bytes):
        if is_blank(line.content):
            continue
        report.requests += 1
        if report.requests > limits.max_lines:
            message = f"more than {limits.max_lines:,} requests: split the file"
            report.faults.append(LineFault("too_many_tasks", message))
            break
        try:
            request = _request(file, line, endpoint)
            if not seen.add(request.custom_id):
                message = "an earlier line has the same custom_id: make it unique"
                raise BadLineError("duplicate_custom_id", message, "custom_id")
            asked = request.body.get("model")
            if (model := served_name(asked, limits.model_names)) is None:
                message = not_served(asked, limits.model_names)["message"]
                raise BadLineError("model_mismatch", message, "body.model")
            report.model = report.model or model or None
            report.estimated_tokens += estimate_tokens(
                line.size_bytes, request.body, limits.context_tokens
            )
            if sorter is not None:
                sorter.add(line, request.body)
        except BadLineError as error:
            report.faults.append(LineFault(error.code, str(error), line.number, error.param))
            if len(report.faults) >= limits.max_faults:
                message = f"only the first {limits.max_faults} faults are listed"
                report.faults.append(LineFault("too_many_errors", message))
                break
    if not report.requests:
        report.faults.append(LineFault("empty_file", "the file has no requests"))
    return report


def _request(file: BinaryIO, line: FileLine, endpoint: str) -> RequestLine:
    """Return what a line asks for, or raise BadLineError."""
    if line.content is None:
        return _large_request(file, line.offset, endpoint)
    try:
        return parse_request_line(line.content, endpoint)
    except LineTooLargeError:
        return line_head(line.content, endpoint)


def _large_request(file: BinaryIO, offset: int, endpoint: str) -> RequestLine:
    """The same of a line that must not be held in memory: the system maps it and drops it."""
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    end = mapped.find(b"\n", offset)
    line = memoryview(mapped)[offset : len(mapped) if end < 0 else end]
    return line_head(line[3:] if offset == 0 and line[:3] == UTF8_BOM else line, endpoint)


def main(path: str, endpoint: str, wanted: str, order: str = "") -> None:
    """Print what is wanted: a report, or the id of a line."""
    os.nice(10)  # Whatever serves requests is more urgent; with 19 a busy host never gets here.
    found: object
    with Path(path).open("rb", buffering=_READ_BYTES) as file:
        if wanted.isdecimal():
            found = None
            with suppress(BadLineError):
                found = _large_request(file, int(wanted), endpoint).custom_id
        else:
            limits = CheckLimits(**orjson.loads(wanted))
            found = asdict(_checked(file, endpoint, limits, Path(order)))
    sys.stdout.buffer.write(orjson.dumps(found))


def _checked(file: BinaryIO, endpoint: str, limits: CheckLimits, order: Path) -> FileReport:
    """Return what a file holds, after its order was written."""
    if not os.environ.get(SCRATCH_VARIABLE):
        return check_file(file, endpoint, limits)
    with closing(PrefixSorter()) as sorter:
        report = check_file(file, endpoint, limits, sorter)
        if not report.faults and report.requests > limits.max_unordered_lines:
            replace(order, sorter.write)
    return report


_SAMPLE_BYTES: Final = 1 << 16
"""A hundred lines or more of most files. A line of that size takes less than half a millisecond
to parse, which holds the interpreter lock: a longer one is judged by its size alone."""


def estimate_file(path: Path, endpoint: str, context_tokens: int) -> int:
    """Return the tokens that the requests in a file may take, prompts and answers. Blocks.

    Those of its first 64 KiB, in proportion to its size: exact for a small file, as exact as
    ``estimate_tokens`` is. Lines that are no requests count as nothing; a first line that is
    longer than that counts as a request. 0 if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            sample = file.read(_SAMPLE_BYTES)
            total_bytes = path.stat().st_size
    except OSError:
        return 0
    if len(sample) < total_bytes:
        # Its last line is cut off, and left out unless it is the only one.
        sample = sample[: sample.rfind(b"\n") + 1] or sample
        if not sample.endswith(b"\n"):
            return round(
                estimate_tokens(len(sample), {}, context_tokens) * total_bytes / len(sample)
            )
    lines = read_lines(BytesIO(sample), _SAMPLE_BYTES)
    tokens = sum(
        _tokens(line.content or b"", line.size_bytes, endpoint, context_tokens) for line in lines
    )
    return round(tokens * total_bytes / len(sample)) if sample else 0


def _tokens(content: bytes, size_bytes: int, endpoint: str, context_tokens: int) -> int:
    try:
        body = parse_request_line(content, endpoint).body
        return estimate_tokens(size_bytes, body, context_tokens)
    except BadLineError:
        return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
