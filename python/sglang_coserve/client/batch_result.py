"""The result of one line, read from its record."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_coserve.lines.result_record import error_message, record_identity

__all__ = ["BatchResult", "LineError", "Response", "decode_record"]


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
    """The result of one line of the input."""

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


def decode_record(record: bytes) -> BatchResult:
    """Return the result in a record of a batch, whoever wrote it.

    Raises:
        ValueError: ``record`` is none.
    """
    identity = record_identity(record)
    if identity is None:
        raise ValueError("not a record of a batch run")
    fields = json.loads(record)
    response = msgspec.convert(fields["response"], Response | None)
    error = msgspec.convert(fields["error"], LineError | None)
    if error is None and response and response.status_code not in range(200, 300):
        # A record has no error of its own where the answer has one.
        error = LineError(f"http_{response.status_code}", error_message(response.body))
    return BatchResult(identity[1], fields["custom_id"], response, error)
