"""What became of one line, and its record in OpenAI's batch output format."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "RECORD_START",
    "BatchResult",
    "LineError",
    "Response",
    "decode_record",
    "encode_record",
    "record_identity",
]

RECORD_START: Final = b'{"id":"batch_req_'
"""How every record begins."""

_RECORD = re.compile(rb'\{"id":"batch_req_([1-9][0-9]{0,17})_([0-9a-f]{16})",')

_SERVER_RECORD = re.compile(rb'\{"id":"batch_req_[0-9a-f]{24}_([1-9][0-9]{0,8})",')


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
    """What became of one line of the input."""

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
        return self._usage("prompt_tokens")

    @property
    def completion_tokens(self) -> int:
        """Generated tokens the server counted; 0 when it did not."""
        return self._usage("completion_tokens")

    def _usage(self, name: str) -> int:
        match self.response and self.response.body:
            case {"usage": dict(usage)}:
                count = usage.get(name)
                return count if isinstance(count, int) else 0
        return 0


def encode_record(result: BatchResult, digest: int) -> bytes:
    """Return the record of ``result``, one line with its ending.

    ``id`` holds the line's number and digest, so that a later run can tell from
    the record alone which line is finished and whether that line has changed.
    """
    response = result.response
    record: dict[str, Any] = {
        "id": f"batch_req_{result.line}_{digest:016x}",
        "custom_id": result.custom_id,
        "response": response
        and {
            "status_code": response.status_code,
            "request_id": response.request_id,
            "body": response.body,
        },
        "error": result.error and {"code": result.error.code, "message": result.error.message},
    }
    if result.error:
        record["line"] = result.line
    try:
        return _dump(record, ensure_ascii=False)
    except UnicodeEncodeError:
        # Half a surrogate pair is legal in JSON text but has no UTF-8 form.
        return _dump(record, ensure_ascii=True)


def _dump(record: dict[str, Any], *, ensure_ascii: bool) -> bytes:
    text = json.dumps(record, ensure_ascii=ensure_ascii, separators=(",", ":"))
    return text.encode() + b"\n"


def record_identity(record: bytes) -> tuple[int, int] | None:
    """Return (line number, digest) of a whole record, or None when it is not one of ours."""
    match = _RECORD.match(record)
    if match is None or not record.endswith(b"}\n"):
        return None
    return int(match[1]), int(match[2], 16)


def decode_record(record: bytes) -> BatchResult:
    """Return the result that ``encode_record`` wrote, or a server's Batch API.

    Raises:
        ValueError: ``record`` is from neither.
    """
    identity = record_identity(record)
    if identity is not None:
        line = identity[0]
    elif (server := _SERVER_RECORD.match(record)) and record.endswith(b"}\n"):
        line = int(server[1])
    else:
        raise ValueError("not a record of a batch run")
    fields = json.loads(record)
    response = fields["response"] and Response(**fields["response"])
    error = fields["error"] and LineError(**fields["error"])
    if identity is None and response and response.status_code not in range(200, 300):
        # A server writes no error of its own where the answer tells of one.
        error = LineError(f"http_{response.status_code}", _told(response.body))
    return BatchResult(line, fields["custom_id"], response, error)


def _told(body: Any) -> str:
    match body:
        case {"error": {"message": str(message)}}:
            return message
    return json.dumps(body)[:500]
