"""Turns a handler's answer into the result of a line."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.responses import Response

from sglang_coserve.lines.backend import LineResult

__all__ = ["engine_failure", "invalid_request", "line_result"]


def line_result(request_id: str, answer: Any) -> LineResult:
    """Return the result for a handler's answer: a model, or a response with an error."""
    if isinstance(answer, BaseModel):
        return LineResult(HTTPStatus.OK.value, request_id, answer.model_dump(mode="json"))
    assert isinstance(answer, Response), f"a handler answered {type(answer).__name__}"
    content = orjson.loads(answer.body)
    # Chat, completions and embeddings return flat errors, responses nest them as OpenAI does.
    error = content.get("error", content)
    fields = {name: error.get(name) for name in ("message", "type", "param", "code")}
    return LineResult(
        answer.status_code,
        request_id,
        {"error": fields},
        is_retryable=answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR,
    )


def invalid_request(request_id: str, message: str) -> LineResult:
    """Return the result for a body that cannot be served, now or later."""
    return _failed(request_id, HTTPStatus.BAD_REQUEST, "invalid_request_error", message)


def engine_failure(request_id: str, message: str) -> LineResult:
    """Return the result for a line that may succeed another time."""
    return _failed(request_id, HTTPStatus.SERVICE_UNAVAILABLE, "server_error", message)


def _failed(request_id: str, status: HTTPStatus, kind: str, message: str) -> LineResult:
    error = {"message": message, "type": kind, "param": None, "code": status.value}
    return LineResult(
        status.value,
        request_id,
        {"error": error},
        is_retryable=status >= HTTPStatus.INTERNAL_SERVER_ERROR,
    )
