"""From a line of the input to a request, or to the error record it deserves."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_coserve.client.batch_result import BatchResult, LineError
from sglang_coserve.client.input_lines import InputLine, LineRef
from sglang_coserve.jsonl.line_json import parse_line, usable_id
from sglang_coserve.jsonl.seen_ids import SeenIds

__all__ = ["BatchRequest", "LineChecker"]


class _Line(BaseModel):
    """OpenAI's batch input format; fields it does not name are ignored, as OpenAI does."""

    model_config = ConfigDict(strict=True, frozen=True)

    custom_id: Annotated[str, Field(min_length=1)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line, ready to be sent."""

    ref: LineRef
    custom_id: str
    url: str
    content: bytes
    """The JSON body; the parsed form is several times larger and is not kept."""


class LineChecker:
    """Checks the lines of one file, each of them once and those of ``check`` in order.

    A line whose ``custom_id`` appeared on any earlier line is a duplicate,
    whether or not that earlier line was valid. Which line is the duplicate thus
    depends on the input alone, and a resumed run judges as the first one did.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._seen = SeenIds()

    def check(self, line: InputLine) -> BatchRequest | BatchResult:
        """Return the request of a line that is not blank, or its failed result."""
        if line.content is None:
            message = f"{line.ref.size_bytes} bytes, more than the limit of {self._max_line_bytes}"
            return _rejected(line.ref, None, "line_too_long", message)
        try:
            fields = parse_line(line.content)
        except ValueError as error:
            code = "invalid_utf8" if isinstance(error, UnicodeDecodeError) else "invalid_json"
            return _rejected(line.ref, None, code, str(error))
        custom_id = usable_id(fields)
        is_new = custom_id is None or self._seen.add(custom_id)
        return _checked(line.ref, fields, custom_id, is_new=is_new)

    def request(self, line: InputLine) -> BatchRequest | None:
        """Return the request of a line out of order, which has the id of no earlier one.

        None where ``check`` will have something to say of it. ``pass_over`` it in its turn.
        """
        if line.content is None:
            return None
        with suppress(ValueError):
            fields = parse_line(line.content)
            checked = _checked(line.ref, fields, usable_id(fields), is_new=True)
            if isinstance(checked, BatchRequest):
                return checked
        return None

    def pass_over(self, line: InputLine) -> None:
        """Take note of a line that is finished, or sent: later lines may have its id."""
        if line.content is None:
            return
        with suppress(ValueError):
            custom_id = usable_id(parse_line(line.content))
            if custom_id is not None:
                self._seen.add(custom_id)

    def close(self) -> None:
        """Release the memory of the ids seen."""
        self._seen.close()


def _checked(
    ref: LineRef, fields: object, custom_id: str | None, *, is_new: bool
) -> BatchRequest | BatchResult:
    """Return the request that a line's JSON asks for, or its failed result."""
    try:
        valid = _Line.model_validate(fields)
    except ValidationError as error:
        return _rejected(ref, custom_id, *_explain(error))
    if not is_new:
        message = "an earlier line has the same custom_id: make it unique"
        return _rejected(ref, custom_id, "duplicate_custom_id", message)
    if valid.body.get("stream"):
        message = "a batch line cannot stream: remove stream from its body"
        return _rejected(ref, custom_id, "stream_not_supported", message)
    try:
        content = _encode_body(valid.body)
    except ValueError as error:
        return _rejected(ref, custom_id, "invalid_json", f"body: {error}")
    return BatchRequest(ref, valid.custom_id, valid.url, content)


def _encode_body(body: dict[str, Any]) -> bytes:
    """Return the body to send, in the offline class unless the line chose one itself.

    Raises:
        ValueError: a number is too large for JSON.
    """
    chosen = body.get("service_tier") is not None or body.get("coserve_class") is not None
    if not chosen:
        body = body | {"service_tier": "flex"}
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _rejected(ref: LineRef, custom_id: str | None, code: str, message: str) -> BatchResult:
    return BatchResult(ref.number, custom_id, error=LineError(code, message))


def _explain(error: ValidationError) -> tuple[str, str]:
    """Return the code and message of the first thing wrong with a line."""
    first = error.errors(include_url=False, include_context=False)[0]
    if not first["loc"]:
        return "invalid_line", "the line is not a JSON object"
    field = str(first["loc"][0])
    if first["type"] == "missing":
        return "missing_field", f"{field} is missing"
    return f"invalid_{field}", f"{field}: {first['msg']}"
