"""One line of a batch file: what is wrong with it, or what it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from sglang_coserve.jsonl.body_limits import BodyLimits, BodyTooLargeError, check_body

__all__ = ["LineError", "RequestLine", "estimate_tokens", "output_limit", "parse_request_line"]

_MAX_VALUES: Final = 1_000_000
_BYTES_PER_TOKEN: Final = 4
_DEFAULT_OUTPUT_TOKENS: Final = 256
_OUTPUT_LIMITS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_MAX_ESTIMATE_TOKENS: Final = 10_000_000


class LineError(ValueError):
    """A line is not OpenAI's batch input format."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class RequestLine:
    """What a line asks for. Whether the body is valid is for the engine to say."""

    custom_id: str
    body: dict[str, Any]


def parse_request_line(content: bytes, endpoint: str) -> RequestLine:
    """Return the request in ``content``, a line without its ending.

    Fields that the format does not name are ignored, as OpenAI does.

    Raises:
        LineError: it is not JSON in UTF-8, too deeply nested (1,024 levels), of too
            many values to be held in memory, or not a request to ``endpoint``.
    """
    # An empty list of 2 bytes becomes an object of 56: the size of a line does not bound it.
    if len(content) > _MAX_VALUES:
        try:
            check_body(content, BodyLimits(len(content), _MAX_VALUES, _MAX_VALUES, len(content)))
        except BodyTooLargeError:
            raise LineError("line_too_complex", f"more than {_MAX_VALUES:,} values") from None
    try:
        fields = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        code = "invalid_utf8" if "UTF-8" in error.msg else "invalid_json"
        raise LineError(code, f"not valid JSON: {error.msg} at byte {error.pos}") from None
    if not isinstance(fields, dict):
        raise LineError("invalid_line", "the line is not a JSON object")
    for name in ("custom_id", "method", "url", "body"):
        if name not in fields:
            raise LineError("missing_field", f"{name} is missing", name)
    custom_id, body = fields["custom_id"], fields["body"]
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError("invalid_custom_id", "custom_id must be a string, not empty", "custom_id")
    if fields["method"] != "POST":
        raise LineError("invalid_method", 'method must be "POST"', "method")
    if fields["url"] != endpoint:
        raise LineError("mismatched_url", f'url must be the batch\'s endpoint, "{endpoint}"', "url")
    if not isinstance(body, dict):
        raise LineError("invalid_body", "body must be a JSON object", "body")
    return RequestLine(custom_id, body)


def output_limit(body: Mapping[str, Any]) -> int | None:
    """Return the limit that a body sets on its answer, in tokens; None when it sets none."""
    return next((body[name] for name in _OUTPUT_LIMITS if type(body.get(name)) is int), None)


def estimate_tokens(size_bytes: int, body: Mapping[str, Any]) -> int:
    """Return how many tokens a line of ``size_bytes`` may take, prompt and answer.

    Only a first guess, from the size of the line and the limit it sets on its answer:
    what the finished lines took corrects it.
    """
    limit = output_limit(body)
    output_tokens = _DEFAULT_OUTPUT_TOKENS if limit is None else limit
    prompt_tokens = 1 + size_bytes // _BYTES_PER_TOKEN
    return prompt_tokens + min(max(0, output_tokens), _MAX_ESTIMATE_TOKENS)
