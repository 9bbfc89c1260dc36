"""The trace formats: which fields a row has and what they mean.

A decoder sees one row and knows nothing of files; what it finds wrong it
raises as ``BadRowError``, to which the reader adds file and line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Final, Literal, NoReturn

__all__ = ["BLOCK_TOKENS", "LAYOUTS", "BadRowError", "TraceFormat", "TraceLayout", "TraceRow"]

BLOCK_TOKENS: Final = 512
"""Prompt tokens covered by one of Mooncake's hash ids."""


class TraceFormat(Enum):
    """The formats ``read_trace`` understands."""

    AZURE = "azure"
    """Azure LLM inference trace, 2023 and 2024: CSV, wall-clock timestamps."""

    BURSTGPT = "burstgpt"
    """BurstGPT: CSV, timestamps in seconds."""

    MOONCAKE = "mooncake"
    """Mooncake: JSONL, timestamps in milliseconds, prefixes as hash ids."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """What one row says. Times count from an origin that differs by format."""

    time_ns: int
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceLayout:
    """How a format is laid out in its file."""

    container: Literal["csv", "jsonl"]

    fields: tuple[str, ...]
    """Names that must be present; the first is the time."""

    decode: Callable[[Mapping[str, Any]], TraceRow]
    """Reads one row: text by column name from CSV, values by key from JSON.
    Raises ``BadRowError``."""


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


def _wall_clock_ns(row: Mapping[str, Any], field: str) -> int:
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


def _seconds_ns(row: Mapping[str, Any], field: str) -> int:
    match = _SECONDS.fullmatch(row[field])
    if match is None:
        _bad(field, "seconds, 0 or more", row[field])
    return int(match[1]) * 10**9 + _fraction_ns(match[2])


def _csv_tokens(row: Mapping[str, Any], field: str) -> int:
    if _COUNT.fullmatch(row[field]) is None:
        _bad(field, "a whole number of tokens, 0 or more", row[field])
    return int(row[field])


def _json_ms_ns(row: Mapping[str, Any], field: str) -> int:
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 10**15:
        _bad(field, "milliseconds, 0 or more", value)
    return round(value * 10**6)


def _json_tokens(row: Mapping[str, Any], field: str) -> int:
    value = row.get(field)
    if type(value) is not int or not 0 <= value < 10**12:
        _bad(field, "a whole number of tokens, 0 or more", value)
    return value


def _azure(row: Mapping[str, Any]) -> TraceRow:
    return TraceRow(
        _wall_clock_ns(row, "TIMESTAMP"),
        _csv_tokens(row, "ContextTokens"),
        _csv_tokens(row, "GeneratedTokens"),
    )


def _burstgpt(row: Mapping[str, Any]) -> TraceRow:
    return TraceRow(
        _seconds_ns(row, "Timestamp"),
        _csv_tokens(row, "Request tokens"),
        _csv_tokens(row, "Response tokens"),
    )


def _mooncake(row: Mapping[str, Any]) -> TraceRow:
    prompt_tokens = _json_tokens(row, "input_length")
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
    return TraceRow(
        _json_ms_ns(row, "timestamp"),
        prompt_tokens,
        _json_tokens(row, "output_length"),
        tuple(hash_ids),
    )


LAYOUTS: Final[Mapping[TraceFormat, TraceLayout]] = {
    TraceFormat.AZURE: TraceLayout(
        "csv", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure
    ),
    TraceFormat.BURSTGPT: TraceLayout(
        "csv", ("Timestamp", "Request tokens", "Response tokens"), _burstgpt
    ),
    TraceFormat.MOONCAKE: TraceLayout(
        "jsonl", ("timestamp", "input_length", "output_length"), _mooncake
    ),
}
"""The layout of every format."""
