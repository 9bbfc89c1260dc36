"""One line of a batch file: what is wrong with it, or what it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from sglang_coserve.jsonl.body_limits import BodyLimits, BodyTooLargeError, check_body

__all__ = [
    "BadLineError",
    "RequestLine",
    "custom_id_of",
    "estimate_tokens",
    "output_limit",
    "parse_json",
    "parse_request_line",
    "request_of",
]

_ANY_ENDPOINT: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")

_MAX_VALUES: Final = 1_000_000
_BYTES_PER_TOKEN: Final = 4
_DEFAULT_OUTPUT_TOKENS: Final = 256
_OUTPUT_LIMITS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_MAX_ESTIMATE_TOKENS: Final = 131_072
"""The context of common models, so their longest answer. Engines refuse a line that asks for more,
and it must not make its batch look too long for its window."""


class BadLineError(ValueError):
    """A line is not OpenAI's batch input format."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class RequestLine:
    """What a line asks for. Whether the body is valid is for the engine to say."""

    custom_id: str
    url: str
    body: dict[str, Any]


def parse_request_line(content: bytes, endpoint: str | None) -> RequestLine:
    """Return the request in ``content``, a line without its ending.

    Fields that the format does not name are ignored, as OpenAI does.

    Raises:
        BadLineError: see ``parse_json`` and ``request_of``.
    """
    return request_of(parse_json(content), endpoint)


def request_of(fields: object, endpoint: str | None) -> RequestLine:
    """Return the request in the parsed line ``fields``.

    Raises:
        BadLineError: it is not a request to ``endpoint``, or, for None, to one of those that every
            server has.
    """
    if not isinstance(fields, dict):
        raise BadLineError("invalid_line", "the line is not a JSON object")
    for name in ("custom_id", "method", "url", "body"):
        if name not in fields:
            raise BadLineError("missing_field", f"{name} is missing", name)
    if (custom_id := custom_id_of(fields)) is None:
        raise BadLineError(
            "invalid_custom_id", "custom_id must be a string, not empty", "custom_id"
        )
    url, body = fields["url"], fields["body"]
    if fields["method"] != "POST":
        raise BadLineError("invalid_method", 'method must be "POST"', "method")
    if endpoint is None and url not in _ANY_ENDPOINT:
        raise BadLineError("invalid_url", f"url must be one of {', '.join(_ANY_ENDPOINT)}", "url")
    if endpoint is not None and url != endpoint:
        raise BadLineError(
            "mismatched_url", f'url must be the batch\'s endpoint, "{endpoint}"', "url"
        )
    if not isinstance(body, dict):
        raise BadLineError("invalid_body", "body must be a JSON object", "body")
    return RequestLine(custom_id, url, body)


def parse_json(content: bytes) -> Any:
    """Return the JSON value of a line.

    Raises:
        BadLineError: it is not JSON in UTF-8, too deeply nested (about 1,000 levels), or of too
            many values to be held in memory.
    """
    # An empty list of 2 bytes becomes an object of 56: the size of a line does not bound it.
    if len(content) > _MAX_VALUES:
        try:
            check_body(content, BodyLimits(len(content), _MAX_VALUES, _MAX_VALUES, len(content)))
        except BodyTooLargeError:
            raise BadLineError("line_too_complex", f"more than {_MAX_VALUES:,} values") from None
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        try:
            content.decode()
        except UnicodeDecodeError as bad:
            raise BadLineError("invalid_utf8", f"not valid UTF-8: {bad.reason}") from None
        raise BadLineError("invalid_json", f"not valid JSON: {error}") from None


def custom_id_of(fields: object) -> str | None:
    """Return the ``custom_id`` of a parsed line; None where it has none that names it."""
    custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
    return custom_id if isinstance(custom_id, str) and custom_id else None


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
