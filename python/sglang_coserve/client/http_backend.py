"""Any OpenAI-compatible server as a backend of the line engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import httpx

from sglang_coserve.client.connections import Connections
from sglang_coserve.errors import ServerError
from sglang_coserve.lines.backend import FailureKind, LineBackend, LineRequest, LineResult
from sglang_coserve.lines.result_record import error_message
from sglang_coserve.lines.retry import retry_after_s

__all__ = ["HttpBackend", "offline_body"]

_UNAVAILABLE = frozenset({429, 502, 503, 504})
_UNAUTHORIZED = frozenset({401, 403})


class HttpBackend(LineBackend):
    """See ``LineBackend``. A server sends a line's tokens only in its answer."""

    model = ""

    def __init__(self, connections: Connections, timeout_s: float | None) -> None:
        """One attempt may take ``timeout_s``; None: as long as it takes."""
        self._connections = connections
        self._timeout_s = timeout_s

    async def run(
        self, request: LineRequest, _on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        """See ``LineBackend``.

        Raises:
            ServerError: the server refuses the API key, whatever the line.
        """
        content = offline_body(request.body)
        try:
            answer = await self._connections.post(request.endpoint, content, self._timeout_s)
        except TimeoutError:
            reason = f"no answer within {self._timeout_s:g} s"
            return LineResult.unserved("request_timeout", reason, FailureKind.TIMED_OUT)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            reason = f"cannot connect to {error.request.url.netloc.decode()}"
            return LineResult.unserved("unreachable", reason, FailureKind.UNREACHABLE)
        except httpx.RequestError as error:
            # Some of these errors have no text of their own.
            reason = f"connection lost: {str(error) or type(error).__name__}"
            return LineResult.unserved("connection_lost", reason, FailureKind.LOST)
        return _result(answer)


def offline_body(body: dict[str, Any]) -> bytes:
    """Return a body to send, in the offline class unless the line chose one itself."""
    if body.get("service_tier") is None and body.get("coserve_class") is None:
        body["service_tier"] = "flex"
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _result(answer: httpx.Response) -> LineResult:
    """Return what an answer says.

    Raises:
        ServerError: every line would be refused.
    """
    body: Any
    try:
        body = json.loads(answer.content)
    except (ValueError, RecursionError):
        body = answer.text
    status = answer.status_code
    if status in _UNAUTHORIZED:
        raise ServerError(
            f"the server refuses the API key (HTTP {status}: {error_message(body)}):"
            " check --api-key or COSERVE_API_KEY"
        )
    request_id = answer.headers.get("x-request-id")
    if request_id is None and isinstance(body, dict):
        request_id = body.get("id")
    request_id = str(request_id or "")
    if status in _UNAVAILABLE:
        pause_s = retry_after_s(answer.headers.get("retry-after"), datetime.now(UTC)) or 0.0
        return LineResult(status, request_id, body, True, FailureKind.UNAVAILABLE, pause_s)
    if answer.is_success and _is_aborted(body):
        reason = "the server aborted the request"
        return LineResult.unserved("aborted", reason, FailureKind.FAILED)
    if answer.is_success and not isinstance(body, dict):
        return LineResult.unserved("invalid_response", "the answer is not a JSON object")
    return LineResult(status, request_id, body, is_retryable=answer.is_server_error)


def _is_aborted(body: object) -> bool:
    """SGLang answers an aborted request with 200 and the text it had by then."""
    match body:
        case {"choices": [*choices]}:
            return any(
                isinstance(choice, dict) and choice.get("finish_reason") == "abort"
                for choice in choices
            )
    return False
