"""Reading recorded workloads: when requests came and how long they were.

Reading is streaming, strict and in order: a row that cannot be right raises, naming file, line and
field, because a slightly wrong workload would give wrong results without anybody noticing. Fields
are found by name, so extra ones (BurstGPT 3 has two) do no harm.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_coserve.errors import InputFileError, WorkloadError
from sglang_coserve.workload.trace_formats import LAYOUTS, BadRowError, TraceFormat, TraceLayout

__all__ = ["TraceRequest", "detect_format", "read_trace"]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request."""

    index: int
    """Its place in the source, from 0: its identity, kept when a trace is sliced."""

    arrival_s: float
    """Seconds since the first request of the source."""

    prompt_tokens: int
    output_tokens: int
    """Tokens produced. A request of zero tokens failed when it was recorded."""

    hash_ids: tuple[int, ...] = ()
    """Names of the prompt's blocks of ``BLOCK_TOKENS`` tokens, from its start.
    Two requests share a prefix as far as their ids agree. The last block may be
    partial; tokens beyond the named blocks are shared with no one."""


def read_trace(path: str | Path) -> Iterator[TraceRequest]:
    """Yield the requests of a trace file in order, in constant memory.

    The first request arrives at 0. Rows with equal timestamps keep the order of
    the file; blank lines are skipped. Opening errors and an unknown format are
    raised by the call itself, everything else while iterating.

    Args:
        path: The file, read twice: its first line to know the format, then all.

    Raises:
        InputFileError: The file cannot be read, is in no known format, or holds no
            request.
        WorkloadError: A row is malformed or earlier than the row before it.
    """
    return _requests(Path(path), LAYOUTS[detect_format(path)])


def detect_format(path: str | Path) -> TraceFormat:
    """Return the format of a trace file, judged by the names in its first line.

    Raises:
        InputFileError: The file cannot be read or its format is unknown.
    """
    path = Path(path)
    return _only(path, _matching_formats(path))


def _requests(path: Path, layout: TraceLayout) -> Iterator[TraceRequest]:
    rows = _csv_rows(path) if layout.container == "csv" else _json_rows(path)
    first_ns: int | None = None
    previous_ns = 0
    for index, (line, row) in enumerate(rows):
        try:
            record = layout.decode(row)
        except BadRowError as error:
            raise _malformed(path, line, str(error)) from None
        if first_ns is None:
            first_ns = record.time_ns
        elif record.time_ns < previous_ns:
            field = layout.fields[0]
            problem = f"{field}: {row[field]!r} is earlier than the row before: sort the file"
            raise _malformed(path, line, problem)
        previous_ns = record.time_ns
        yield TraceRequest(
            index,
            # Whole numbers until here: a float of seconds since 1970 cannot hold 100 ns.
            (record.time_ns - first_ns) / 1e9,
            record.prompt_tokens,
            record.output_tokens,
            record.hash_ids,
        )
    if first_ns is None:
        raise InputFileError(f"{path}: the trace holds no request")


def _malformed(path: Path, line: int, problem: str) -> WorkloadError:
    return WorkloadError(f"{path}:{line}: {problem}")


def _lines(path: Path) -> Iterator[str]:
    try:
        # Bytes that are not UTF-8 become marks that no field accepts, so the
        # error can name their line. newline="" is what the csv module asks for.
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            yield from file
    except OSError as error:
        raise InputFileError(f"{path}: cannot be read: {error.strerror}") from error


def _csv_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(_lines(path), strict=True)
    header: list[str] | None = None
    try:
        for values in reader:
            if not values:
                continue
            if header is None:
                header = values
            elif len(values) != len(header):
                problem = f"{len(values)} fields where the header names {len(header)}"
                raise _malformed(path, reader.line_num, problem)
            else:
                yield reader.line_num, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise _malformed(path, reader.line_num, f"not CSV: {error}") from error


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, text in enumerate(_lines(path), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _malformed(path, line, f"not JSON: {error}") from error
        if not isinstance(row, dict):
            raise _malformed(path, line, "not a JSON object")
        yield line, row


def _matching_formats(path: Path) -> list[TraceFormat]:
    first_line = next((line for line in _lines(path) if line.strip()), "")
    try:
        row = json.loads(first_line)
        container, names = "jsonl", set(row) if isinstance(row, dict) else set()
    except (ValueError, RecursionError):
        container, names = "csv", set(first_line.rstrip("\r\n").replace('"', "").split(","))
    return [
        trace_format
        for trace_format, layout in LAYOUTS.items()
        if layout.container == container and names.issuperset(layout.fields)
    ]


def _only(path: Path, matching: list[TraceFormat]) -> TraceFormat:
    if len(matching) != 1:
        known = "; ".join(map(_describe, TraceFormat))
        raise InputFileError(f"{path}: unknown trace format, known are: {known}")
    return matching[0]


def _describe(trace_format: TraceFormat) -> str:
    layout = LAYOUTS[trace_format]
    fields = ", ".join(layout.fields)
    return f"{trace_format.value} ({layout.container} with the fields {fields})"
