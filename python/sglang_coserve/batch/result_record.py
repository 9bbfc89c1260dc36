"""Records of finished lines, in OpenAI's batch output format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from sglang_coserve.batch.backend import LineResult
from sglang_coserve.batch.record import Usage

__all__ = ["encode_result", "encode_unserved", "record_line", "usage_in_record", "usage_of"]

_HEAD: Final = re.compile(rb'\{"id":"batch_req_([0-9a-f]{24})_([1-9][0-9]{0,8})",')


def encode_result(batch_id: str, line: int, custom_id: str, result: LineResult) -> bytes:
    """Return the record of a line that the engine answered, well or badly, with its line ending."""
    response = {
        "status_code": result.status_code,
        "request_id": result.request_id,
        "body": result.body,
    }
    return _encode(batch_id, line, custom_id, response, None)


def encode_unserved(batch_id: str, line: int, custom_id: str, code: str, message: str) -> bytes:
    """Return the record of a line that has no answer, with its line ending."""
    return _encode(batch_id, line, custom_id, None, {"code": code, "message": message})


def _encode(
    batch_id: str,
    line: int,
    custom_id: str,
    response: Mapping[str, Any] | None,
    error: Mapping[str, Any] | None,
) -> bytes:
    record = {
        # First, and of a fixed form: ``record_line`` reads it without parsing the record.
        "id": f"batch_req_{batch_id.removeprefix('batch_')}_{line}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    try:
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        # Half a surrogate pair and integers beyond 64 bits have a JSON form, but not orjson's.
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def record_line(record: bytes, batch_id: str) -> int | None:
    """Return the line of a whole record of ``batch_id``; None when it is not one."""
    match = _HEAD.match(record)
    if match is None or not record.endswith(b"}\n"):
        return None
    is_ours = match[1] == batch_id.removeprefix("batch_").encode()
    return int(match[2]) if is_ours else None


def usage_in_record(record: bytes) -> Usage:
    """Return the tokens that a record says its line took."""
    response = json.loads(record)["response"]
    return usage_of(response["body"]) if response else Usage()


def usage_of(body: Mapping[str, Any]) -> Usage:
    """Return the tokens in the ``usage`` of a response.

    Chat completions and completions say prompt and completion, responses say
    input and output, embeddings have a prompt only.
    """
    usage = body.get("usage")
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


def _count(fields: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = fields.get(name)
        if type(value) is int and value >= 0:
            return value
    return 0


def _detail(usage: Mapping[str, Any], first: str, second: str, name: str) -> int:
    for group in (first, second):
        details = usage.get(group)
        if isinstance(details, Mapping):
            return _count(details, name)
    return 0
