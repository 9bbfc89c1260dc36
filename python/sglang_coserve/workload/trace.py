"""Reads recorded workloads of several formats: when requests came and how long they were.

Reading is streaming, strict and in order: a row that cannot be right raises, naming file, line and
field, because a slightly wrong workload would give wrong results without anybody noticing. Fields
are found by name, so extra ones (BurstGPT 3 has two) do no harm. What reads a field sees one
row and knows nothing of files; what it finds wrong it raises as ``BadRowError``.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from sglang_coserve.errors import InputFileError

BLOCK_TOKENS: Final = 512
"""Prompt tokens covered by one of Mooncake's hash ids."""


_Row = Mapping[str, Any]
"""Text by column name from CSV, values by key from JSON."""


@dataclass(frozen=True, slots=True)
class TraceLayout:
    """How a format is laid out in its file."""

    name: str
    container: Literal["csv", "jsonl"]

    fields: tuple[str, str, str]
    """Names that must be present: of the time, and of the tokens of prompt and output."""

    time_ns: Callable[[_Row, str], int]
    """Reads the time, from an origin that differs by format. Raises ``BadRowError``."""


class BadRowError(Exception):
    """What is wrong with a row, its field named first."""


def _bad(field: str, expected: str, value: object) -> NoReturn:
    raise BadRowError(f"{field}: expected {expected}, got {value!r:.80}")


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_WALL_CLOCK: Final = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?", re.ASCII
)
_SECONDS: Final = re.compile(r"(\d{1,12})(?:\.(\d+))?", re.ASCII)
_COUNT: Final = re.compile(r"\d{1,12}", re.ASCII)


def _fraction_ns(digits: str | None) -> int:
    return int((digits or "")[:9].ljust(9, "0"))


def _wall_clock_ns(row: _Row, field: str) -> int:
    """Return nanoseconds since 1970; without an offset the time is UTC.

    ``datetime`` alone holds microseconds and would cut Azure's seventh digit off.
    """
    match = _WALL_CLOCK.fullmatch(row[field])
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(match[1] + (match[3] or "Z"))
    except ValueError:
        _bad(field, "a time such as 2023-11-16 18:15:46.6805900", row[field])
    return (moment - _EPOCH) // timedelta(seconds=1) * 10**9 + _fraction_ns(match[2])


def _seconds_ns(row: _Row, field: str) -> int:
    match = _SECONDS.fullmatch(row[field])
    if match is None:
        _bad(field, "seconds, 0 or more", row[field])
    return int(match[1]) * 10**9 + _fraction_ns(match[2])


def _json_ms_ns(row: _Row, field: str) -> int:
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 10**15:
        _bad(field, "milliseconds, 0 or more", value)
    return round(value * 10**6)


def _csv_tokens(row: _Row, field: str) -> int:
    if _COUNT.fullmatch(row[field]) is None:
        _bad(field, "a whole number of tokens, 0 or more", row[field])
    return int(row[field])


def _json_tokens(row: _Row, field: str) -> int:
    value = row.get(field)
    if type(value) is not int or not 0 <= value < 10**12:
        _bad(field, "a whole number of tokens, 0 or more", value)
    return value


def _hash_ids(row: _Row, prompt_tokens: int) -> tuple[int, ...]:
    """Return Mooncake's names of blocks; none in other formats."""
    hash_ids = row.get("hash_ids", [])
    if type(hash_ids) is not list:
        _bad("hash_ids", "a list of block ids", hash_ids)
    for block in hash_ids:
        if type(block) is not int or not 0 <= block < 2**63:
            _bad("hash_ids", "whole numbers from 0 up", block)
    # Catches traces of the same shape with other block sizes, whose prompts
    # would come out sharing what they do not share.
    if len(hash_ids) > -(-prompt_tokens // BLOCK_TOKENS):
        expected = f"at most one id per {BLOCK_TOKENS} of {prompt_tokens} prompt tokens"
        _bad("hash_ids", expected, len(hash_ids))
    return tuple(hash_ids)


_LAYOUTS: Final = (
    # Azure LLM inference trace, 2023 and 2024: wall-clock timestamps.
    TraceLayout("azure", "csv", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _wall_clock_ns),
    # Timestamps in seconds.
    TraceLayout("burstgpt", "csv", ("Timestamp", "Request tokens", "Response tokens"), _seconds_ns),
    # Timestamps in milliseconds, prefixes as hash ids.
    TraceLayout("mooncake", "jsonl", ("timestamp", "input_length", "output_length"), _json_ms_ns),
)


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
            request; or a row is malformed, or earlier than the row before it.
    """
    path = Path(path)
    return _requests(path, _layout_of(path))


def _layout_of(path: Path) -> TraceLayout:
    """Return the format of a trace file, judged by the names in its first line."""
    first_line = next((line for line in _lines(path) if line.strip()), "")
    try:
        row = json.loads(first_line)
        container, names = "jsonl", set(row) if isinstance(row, dict) else set()
    except (ValueError, RecursionError):
        container, names = "csv", set(first_line.rstrip("\r\n").replace('"', "").split(","))
    for layout in _LAYOUTS:
        if layout.container == container and names.issuperset(layout.fields):
            return layout
    known = "; ".join(
        f"{layout.name} ({layout.container} with the fields {', '.join(layout.fields)})"
        for layout in _LAYOUTS
    )
    raise InputFileError(f"{path}: unknown trace format, known are: {known}")


def _requests(path: Path, layout: TraceLayout) -> Iterator[TraceRequest]:
    is_csv = layout.container == "csv"
    rows = _csv_rows(path) if is_csv else _json_rows(path)
    tokens = _csv_tokens if is_csv else _json_tokens
    time_field, prompt_field, output_field = layout.fields
    first_ns: int | None = None
    previous_ns = 0
    for index, (line, row) in enumerate(rows):
        try:
            time_ns = layout.time_ns(row, time_field)
            prompt_tokens, output_tokens = tokens(row, prompt_field), tokens(row, output_field)
            hash_ids = () if is_csv else _hash_ids(row, prompt_tokens)
        except BadRowError as error:
            raise _malformed(path, line, str(error)) from None
        if first_ns is None:
            first_ns = time_ns
        elif time_ns < previous_ns:
            problem = f"{time_field}: {row[time_field]!r} is earlier than the row before: "
            problem += "sort the file"
            raise _malformed(path, line, problem)
        previous_ns = time_ns
        # Whole numbers until here: a float of seconds since 1970 cannot hold 100 ns.
        arrival_s = (time_ns - first_ns) / 1e9
        yield TraceRequest(index, arrival_s, prompt_tokens, output_tokens, hash_ids)
    if first_ns is None:
        raise InputFileError(f"{path}: the trace holds no request")


def _malformed(path: Path, line: int, problem: str) -> InputFileError:
    return InputFileError(f"{path}:{line}: {problem}")


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


_FILES: Final = {"online": "online_sample.csv", "offline": "offline_sample.jsonl"}


def sample_path(name: Literal["online", "offline"]) -> Path:
    """Return the path of a bundled sample.

    ``online`` is a ten-minute trace in Azure's CSV format, ``offline`` a JSONL
    file of 400 chat requests in the OpenAI batch format. Both are synthetic, made by
    ``scripts/samples`` of e5c66b34.
    """
    return Path(str(files("sglang_coserve") / "data" / _FILES[name]))
