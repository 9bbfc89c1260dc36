"""Sends one line to a server over HTTP, as often as it takes."""

from __future__ import annotations

import asyncio
import json
import random
import time
from datetime import UTC, datetime
from typing import Any

import httpx

from sglang_coserve.client.batch_result import BatchResult, LineError, Response
from sglang_coserve.client.connections import Connections
from sglang_coserve.client.line_checker import BatchRequest
from sglang_coserve.client.options import ClientOptions
from sglang_coserve.client.retry import (
    Failure,
    FailureKind,
    LineRetries,
    ServerHealth,
    retry_after_s,
)
from sglang_coserve.errors import ServerError

__all__ = ["HttpSender"]

_UNAVAILABLE = frozenset({429, 502, 503, 504})
_UNAUTHORIZED = frozenset({401, 403})


class HttpSender:
    """An OpenAI-compatible server as one run sees it: something that finishes lines."""

    def __init__(self, connections: Connections, options: ClientOptions) -> None:
        self._connections = connections
        self._options = options
        self._rng = random.Random(options.seed)
        self._health = ServerHealth(time.monotonic())

    @property
    def trouble(self) -> str | None:
        """Why lines are being retried; None while the server answers."""
        return self._health.trouble

    async def send(self, request: BatchRequest) -> BatchResult:
        """Return what became of a line, good or bad.

        Raises:
            ServerGoneError: the server answered nothing for ``retry_for_s``.
            ServerError: the server refuses the API key, whatever the line.
        """
        line = request.ref.number
        retries = LineRetries(line, self._options.retry_policy, self._health, self._rng)
        while True:
            retries.began(time.monotonic())
            answer = await self._try(request)
            if isinstance(answer, Response):
                self._health.answered(time.monotonic())
                return BatchResult(line, request.custom_id, answer, _verdict(answer))
            delay_s = retries.failed(answer, time.monotonic())
            if delay_s is None:
                error = LineError(answer.code, answer.reason)
                return BatchResult(line, request.custom_id, answer.response, error)
            await asyncio.sleep(delay_s)

    async def _try(self, request: BatchRequest) -> Response | Failure:
        """Send a line once; a failure is one that may pass."""
        timeout_s = self._options.request_timeout_s
        try:
            answer = await self._connections.post(request.url, request.content, timeout_s)
        except TimeoutError:
            reason = f"no answer within {timeout_s:g} s"
            return Failure(FailureKind.TIMED_OUT, "request_timeout", reason)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            reason = f"cannot connect to {error.request.url.netloc.decode()}"
            return Failure(FailureKind.UNREACHABLE, "unreachable", reason)
        except httpx.RequestError as error:
            # Some of these errors have no text of their own.
            reason = f"connection lost: {str(error) or type(error).__name__}"
            return Failure(FailureKind.LOST, "connection_lost", reason)
        response = _response(answer)
        if answer.is_success and _is_aborted(response):
            reason = "the server aborted the request"
            return Failure(FailureKind.FAILED, "aborted", reason, response=response)
        return _passing_failure(answer, response) or response


def _passing_failure(answer: httpx.Response, response: Response) -> Failure | None:
    """Return what is wrong when another attempt may go better, else None.

    Raises:
        ServerError: every line would be refused.
    """
    status = answer.status_code
    if status < 500 and status not in _UNAVAILABLE | _UNAUTHORIZED:
        return None
    code, reason = f"http_{status}", f"HTTP {status}: {_message(response)}"
    if status in _UNAUTHORIZED:
        raise ServerError(
            f"the server refuses the API key ({reason}): check --api-key or COSERVE_API_KEY"
        )
    if status not in _UNAVAILABLE:
        return Failure(FailureKind.FAILED, code, reason, response=response)
    pause_s = retry_after_s(answer.headers.get("retry-after"), datetime.now(UTC))
    return Failure(FailureKind.UNAVAILABLE, code, reason, pause_s, response)


def _response(answer: httpx.Response) -> Response:
    body: Any
    try:
        body = json.loads(answer.content)
    except (ValueError, RecursionError):
        body = answer.text
    request_id = answer.headers.get("x-request-id")
    if request_id is None and isinstance(body, dict):
        request_id = body.get("id")
    return Response(answer.status_code, str(request_id or ""), body)


def _is_aborted(response: Response) -> bool:
    """SGLang answers an aborted request with 200 and the text it had by then."""
    match response.body:
        case {"choices": [*choices]}:
            return any(
                isinstance(choice, dict) and choice.get("finish_reason") == "abort"
                for choice in choices
            )
    return False


def _verdict(response: Response) -> LineError | None:
    """Return None for a line that was served, else what the server has against it."""
    if response.status_code not in range(200, 300):
        return LineError(f"http_{response.status_code}", _message(response))
    if not isinstance(response.body, dict):
        return LineError("invalid_response", "the answer is not a JSON object")
    return None


def _message(response: Response) -> str:
    """Return the server's own words, from OpenAI's nested or SGLang's flat error object."""
    match response.body:
        case {"error": {"message": str(message)}} | {"message": str(message)}:
            return message
        case str(text) if text:
            return text[:500]
    return json.dumps(response.body)[:500]
