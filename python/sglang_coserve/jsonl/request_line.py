"""One line of a batch file: what is wrong with it, or what it asks for."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson

from sglang_coserve.jsonl.body_limits import (
    MAX_DEPTH,
    BodyLimits,
    BodyTooDeepError,
    BodyTooLargeError,
    check_body,
    mended_json,
)

_ANY_ENDPOINT: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_ENDPOINTS: Final = (*_ANY_ENDPOINT, "/v1/responses")
_FIELDS: Final = ("custom_id", "method", "url", "body")

MAX_ID_CHARS: Final = 512
"""Longest ``custom_id``. It is in memory while its line is served, and in the line's record."""

MAX_MODEL_CHARS: Final = 256
"""Longest name of a model."""

_MAX_VALUES: Final = 1_000_000
_BYTES_PER_TOKEN: Final = 4
_DEFAULT_OUTPUT_TOKENS: Final = 256
OUTPUT_LIMITS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")


class BadLineError(ValueError):
    """A line is not OpenAI's batch input format. ``code`` is what OpenAI calls the fault."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class LineTooLargeError(BadLineError):
    """A line has too many values to be held in memory."""


@dataclass(frozen=True, slots=True)
class RequestLine:
    """What a line asks for. Whether the body is valid is for the engine to say."""

    custom_id: str
    url: str
    """The path of the endpoint, in OpenAI's form."""

    body: dict[str, Any]


def endpoint_of(url: str) -> str:
    """Return OpenAI's path of an endpoint that is named as OpenAI or, without ``/v1``, Azure names
    it; any other ``url`` as it is."""
    return f"/v1{url}" if f"/v1{url}" in _ENDPOINTS else url


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
        raise BadLineError("invalid_json_line", "the line is not a JSON object")
    for name in _FIELDS:
        if name not in fields:
            raise BadLineError("invalid_request", f"{name} is missing", name)
    if (custom_id := custom_id_of(fields)) is None:
        message = f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters"
        raise BadLineError("invalid_request", message, "custom_id")
    url, body = fields["url"], fields["body"]
    if isinstance(url, str):
        url = endpoint_of(url)
    if fields["method"] != "POST":
        raise BadLineError("invalid_request", 'method must be "POST"', "method")
    if endpoint is None and url not in _ANY_ENDPOINT:
        raise BadLineError("url_mismatch", f"url must be one of {', '.join(_ANY_ENDPOINT)}", "url")
    if endpoint is not None and url != endpoint:
        message = f'url must be the batch\'s endpoint, "{endpoint}"'
        raise BadLineError("url_mismatch", message, "url")
    if not isinstance(body, dict):
        raise BadLineError("invalid_request", "body must be a JSON object", "body")
    return RequestLine(custom_id, url, body)


class _Head(msgspec.Struct):
    """The fields of a line as they stand in it."""

    custom_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    method: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    url: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    body: _Body | msgspec.UnsetType = msgspec.UNSET


class _Body(msgspec.Struct):
    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def line_head(content: bytes | memoryview, endpoint: str | None) -> RequestLine:
    """Return the request in a line that is too large to be served, with nothing of its body but
    the model. The line is scanned, not parsed.

    Raises:
        BadLineError: as ``parse_request_line``, but for what is wrong inside of the body.
    """
    try:
        head = msgspec.json.decode(content, type=_Head)
    except msgspec.ValidationError:
        message = "the line and its body must be JSON objects"
        raise BadLineError("invalid_request", message) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return request_of(parse_json(bytes(content)), endpoint)  # To say what is wrong, or mend it.
    fields = _set_fields(head)
    if isinstance(head.body, _Body):
        fields["body"] = _set_fields(head.body)
    return request_of(fields, endpoint)


def _set_fields(struct: msgspec.Struct) -> dict[str, Any]:
    return {
        name: parse_json(bytes(value))
        for name in struct.__struct_fields__
        if isinstance(value := getattr(struct, name), msgspec.Raw)
    }


class _Id(msgspec.Struct):
    custom_id: str | None = None


def id_in(content: bytes) -> str | None:
    """Return the ``custom_id`` of a line that is no request; None where it cannot be told."""
    try:
        return custom_id_of({"custom_id": msgspec.json.decode(content, type=_Id).custom_id})
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def parse_json(content: bytes) -> Any:
    """Return the JSON value of a line.

    Half a surrogate pair becomes U+FFFD (``mended_json``).

    Raises:
        LineTooLargeError: it has too many values to be held in memory.
        BadLineError: it is not JSON in UTF-8, or too deeply nested (``MAX_DEPTH``).
    """
    # An empty list of 2 bytes becomes an object of 56: the size of a line does not bound it.
    if len(content) > _MAX_VALUES or content.count(b"[") + content.count(b"{") > MAX_DEPTH:
        try:
            check_body(content, BodyLimits(len(content), _MAX_VALUES, _MAX_VALUES, len(content)))
        except BodyTooDeepError as error:
            raise BadLineError("invalid_json_line", str(error)) from None
        except BodyTooLargeError:
            message = f"the request has more than {_MAX_VALUES:,} values: split it"
            raise LineTooLargeError("line_too_complex", message) from None
    try:
        return msgspec.json.decode(mended_json(content))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        try:
            content.decode()
        except UnicodeDecodeError as bad:
            message = f"not valid UTF-8: {bad.reason}"
        else:
            message = f"not valid JSON: {str(error).partition(' - at ')[0]}"
        raise BadLineError("invalid_json_line", message) from None


def custom_id_of(fields: object) -> str | None:
    """Return the ``custom_id`` of a parsed line; None where it has none that names it."""
    custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
    is_id = isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_ID_CHARS
    return custom_id if is_id else None


def output_limit(body: Mapping[str, Any]) -> int | None:
    """Return the limit that a body sets on its answer, in tokens; None when it sets none."""
    return next((body[name] for name in OUTPUT_LIMITS if type(body.get(name)) is int), None)


def estimate_tokens(size_bytes: int, body: Mapping[str, Any], context_tokens: int) -> int:
    """Return how many tokens a line of ``size_bytes`` may take, prompt and answer.

    Only a first guess, from the size of the line, the limit it sets on its answer, and the room
    that its prompt leaves in the context: what the finished lines took corrects it.
    """
    limit = output_limit(body)
    output_tokens = _DEFAULT_OUTPUT_TOKENS if limit is None else limit
    prompt_tokens = 1 + size_bytes // _BYTES_PER_TOKEN
    return prompt_tokens + max(0, min(output_tokens, context_tokens - prompt_tokens))


_WHATEVER_IS_SERVED: Final = ("", "default")
_MAX_CHARS: Final = 128


def served_name(model: object, names: Sequence[str]) -> str | None:
    """Return what answers to ``model``: the model's name, or ``MODEL:ADAPTER``; None if nothing.

    What is no name, or cannot be checked because nothing is known, is for the engine to refuse.
    Nothing has a name of more than ``MAX_MODEL_CHARS``.

    Args:
        model: As a request has it.
        names: The model's, then its adapters'; empty while they are unknown.
    """
    if isinstance(model, str) and len(model) > MAX_MODEL_CHARS:
        return None
    if not names:
        return model if isinstance(model, str) else ""
    name, *adapters = names
    if not isinstance(model, str) or model == name or model in _WHATEVER_IS_SERVED:
        return name
    if model in adapters:
        return f"{name}:{model}"
    base, _, adapter = model.rpartition(":")
    if adapter in adapters and base in (name, *_WHATEVER_IS_SERVED[1:]):
        return f"{name}:{adapter}"
    return None


def not_served(model: object, names: Sequence[str]) -> dict[str, str]:
    """Return the error, as OpenAI has it, of a request for a model that is not served."""
    asked = repr(model) if len(repr(model)) <= _MAX_CHARS else f"{repr(model)[:_MAX_CHARS]}…"
    known = f"use {', '.join(map(repr, names))}, or leave model out"
    return {
        "message": f"the model {asked} is not served here: {known if names else 'none is, yet'}",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


_BLOCK_BYTES: Final = 128
"""About 32 tokens: what two prompts have in common is seen to within so much."""

_MOST_BLOCKS: Final = 64
KEY_BLOCK_BYTES: Final = 4


def prefix_key(body: Mapping[str, Any]) -> bytes:
    """Return the key of a request's prompt.

    For each block of 128 bytes of its text, up to 8 KiB, 4 bytes that depend on all text up to the
    block's end. So sorted by keys, prompts stand next to those with which they share most,
    whatever chat template is put around them; where two differ by chance only in
    the 4 bytes, they stand apart, and nothing else comes of it. What the prompt is made of
    is not checked.
    """
    text = bytearray()
    # In the order in which templates put it together.
    for name in ("tools", "instructions", "messages", "prompt", "input"):
        if value := body.get(name):
            try:
                text += orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
            except TypeError:  # Nested too deeply, or half a surrogate pair.
                text += b"?"
    key, checksum = bytearray(), 0
    for start in range(0, min(len(text), _BLOCK_BYTES * _MOST_BLOCKS), _BLOCK_BYTES):
        checksum = zlib.crc32(text[start : start + _BLOCK_BYTES], checksum)
        key += checksum.to_bytes(KEY_BLOCK_BYTES)
    return bytes(key)
