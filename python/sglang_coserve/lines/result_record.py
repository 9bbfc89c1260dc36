"""Records of finished lines, in OpenAI's batch output format, and their sums."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
import orjson

from sglang_coserve.lines.backend import LineResult

_T = TypeVar("_T")

RECORD_START: Final = b'{"id":"batch_req_'
"""The first bytes of every record."""

_HEAD: Final = re.compile(RECORD_START + rb'([0-9a-f]{24})_([1-9][0-9]{0,17})",')

_ESCAPED: Final = tuple(
    (char.encode(), f"\\u{ord(char):04x}".encode()) for char in ("\u2028", "\u2029", "\x85")
)
"""No line endings in JSON lines, but many readers split there (``str.splitlines``, Node)."""

_MESSAGE_CHARS: Final = 500


def batch_tag(batch_id: str) -> int:
    """Return the tag of a batch's records: its id as a number."""
    return int(batch_id.removeprefix("batch_"), 16)


def encode_record(tag: int, line: int, custom_id: str | None, result: LineResult) -> bytes:
    """Return the record of a line, with its line ending.

    ``tag`` has 96 bits and identifies the batch (``batch_tag``). Outputs of earlier versions of the
    client have a digest of each line in its place.
    """
    error = None
    if not result.status_code:
        error = {name: result.body["error"][name] for name in ("code", "message")}
    record = {
        # First, and of a fixed form: ``record_identity`` reads it without parsing the record.
        "id": f"batch_req_{tag:024x}_{line}",
        "custom_id": custom_id,
        "response": None
        if error
        else {
            "status_code": result.status_code,
            "request_id": result.request_id,
            "body": result.body,
        },
        "error": error,
    }
    encoded = encode_json(record) + b"\n"
    for char, escape in _ESCAPED:
        encoded = encoded.replace(char, escape)
    return encoded


def encode_json(value: Any) -> bytes:
    """Return compact JSON."""
    try:
        return orjson.dumps(value)
    except TypeError:
        # Lone surrogates and integers beyond 64 bits are valid JSON, but orjson refuses them.
        return json.dumps(value, separators=(",", ":")).encode()


def decode_json(content: bytes, kind: type[_T]) -> _T:
    """Return JSON as a value of this ``kind``; fields that the kind does not know are ignored.

    Raises:
        ValueError: the content is not JSON, or not of this kind.
        RecursionError: it is nested too deeply.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # Lone surrogates are valid in JSON, as escapes, but msgspec refuses them.
        if b"\\u" not in content:
            raise
        return msgspec.convert(json.loads(content), kind)


def record_identity(record: bytes) -> tuple[int, int] | None:
    """Return (tag, line) of a whole record; None when it is not one."""
    match = _HEAD.match(record)
    if match is None or not record.endswith(b"}\n"):
        return None
    return int(match[1], 16), int(match[2])


def error_message(body: object) -> str:
    """Return the message of OpenAI's nested or SGLang's flat error object."""
    match body:
        case {"error": {"message": str(message)}} | {"message": str(message)}:
            return message
        case str(text) if text:
            return text[:_MESSAGE_CHARS]
    return json.dumps(body)[:_MESSAGE_CHARS]


def error_code(body: object) -> object:
    """Return the code of OpenAI's nested error object; None without one."""
    match body:
        case {"error": {"code": code}}:
            return code
    return None


def usage_in_record(record: bytes) -> Usage | None:
    """Return the token usage stored in a record; None when not all of the record is there."""
    try:
        response = json.loads(record)["response"]
        return usage_of(response["body"]) if response else Usage()
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def usage_of(body: object) -> Usage:
    """Return the token counts in the ``usage`` of a response.

    Chat completions and completions call them prompt and completion tokens, responses
    input and output tokens; embeddings have prompt tokens only.
    """
    usage = body.get("usage") if isinstance(body, Mapping) else None
    if not isinstance(usage, Mapping):
        return Usage()
    return Usage(
        input_tokens=_count(usage, "input_tokens", "prompt_tokens"),
        cached_tokens=_detail(
            usage, "input_tokens_details", "prompt_tokens_details", "cached_tokens"
        ),
        output_tokens=_count(usage, "output_tokens", "completion_tokens"),
        reasoning_tokens=_detail(
            usage, "output_tokens_details", "completion_tokens_details", "reasoning_tokens"
        ),
    )


MOST_TOKENS: Final = 1 << 32
"""Most tokens that are counted for one line. Sums over lines are kept in 64 bits."""


def _count(fields: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = fields.get(name)
        if type(value) is int and value >= 0:
            return min(value, MOST_TOKENS)
    return 0


def _detail(usage: Mapping[str, Any], first: str, second: str, name: str) -> int:
    for group in (first, second):
        details = usage.get(group)
        if isinstance(details, Mapping):
            return _count(details, name)
    return 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, summed over finished lines."""

    input_tokens: int = 0
    cached_tokens: int = 0
    """Those of ``input_tokens`` that were cached."""

    output_tokens: int = 0
    reasoning_tokens: int = 0
    """Those of ``output_tokens`` that are not part of the answer."""

    @property
    def total_tokens(self) -> int:
        """Input and output together."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """The contents of the output and error files, as far as both are on disk."""

    completed: int = 0
    failed: int = 0
    output_bytes: int = 0
    error_bytes: int = 0
    usage: Usage = Usage()

    estimated_tokens: int = 0
    """Estimated tokens of the finished lines; compared with ``usage`` it calibrates the estimate
    of the others."""

    def __add__(self, other: Progress) -> Progress:
        return Progress(
            self.completed + other.completed,
            self.failed + other.failed,
            self.output_bytes + other.output_bytes,
            self.error_bytes + other.error_bytes,
            self.usage + other.usage,
            self.estimated_tokens + other.estimated_tokens,
        )

    @property
    def lines(self) -> int:
        """Number of finished lines."""
        return self.completed + self.failed
