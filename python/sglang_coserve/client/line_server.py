"""Any OpenAI-compatible server as a backend: each line is one POST."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, Self

import aiohttp
import httpx

from sglang_coserve.client.calls import CONNECT_TIMEOUT_S, Outage, server_address
from sglang_coserve.client.options import ClientOptions
from sglang_coserve.errors import ServerError, ServerGoneError
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.lines.backend import (
    Backend,
    BackendLoad,
    FailureKind,
    LineRequest,
    LineResult,
    TokenRate,
)
from sglang_coserve.lines.result_record import error_message, usage_of
from sglang_coserve.lines.serve_line import retry_after_s

_KEEPALIVE_S: Final = 4.0
"""Shorter than the 5 s after which uvicorn closes an idle connection, so that a request seldom
meets a connection that is being closed."""

_SILENT_PEER: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""Options of TCP keep-alive by which a connection to a machine that is gone ends in two minutes."""

_UNAVAILABLE: Final = frozenset({429, 502, 503, 504})
_UNAUTHORIZED: Final = frozenset({401, 403})

_MAX_VALUES: Final = 1_000_000
"""Most JSON values of a line, as ``parse_json`` has it: no online request waits here meanwhile."""


class LineServer(Backend):
    """See ``Backend``. A server sends a line's tokens only in its answer.

    The server is given up when a line has failed for ``retry_for_s`` in which no line was answered,
    or when the server refuses the API key: ``watch`` raises why, and no line ends for that reason.

    A line may take hours, so only connecting always has a timeout; TCP keep-alive finds out when
    the machine at the other end is gone. Neither proxy settings of the environment nor cookies are
    used.
    """

    model = ""
    endpoints = frozenset(
        {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"}
    )

    def __init__(
        self, base_url: str, api_key: str | None, options: ClientOptions, places: asyncio.Semaphore
    ) -> None:
        """Prepare the connections; use them in an ``async with`` statement.

        ``places`` bounds the lines that are sent at the same time by all that share it.

        Raises:
            ConfigError: the address or the key cannot be used.
        """
        self._address, headers = server_address(base_url, api_key)
        self._headers = headers | {"content-type": "application/json"}
        self._options = options
        self._places = places
        self._rate = TokenRate(time.monotonic)
        self._outages: dict[int, Outage] = {}
        """Of the lines that have failed since the last answer, by their numbers."""

        self._reason: str | None = None
        self._error: ServerError | None = None
        self._is_given_up = asyncio.Event()

    async def __aenter__(self) -> Self:
        # Not httpx, whose pool looks at every connection whenever one changes: with many at a
        # time that costs more than the requests.
        is_encrypted = self._address.scheme == "https"
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(
                limit=self._options.concurrency,
                keepalive_timeout=_KEEPALIVE_S,
                socket_factory=_kept_alive,
                ssl=httpx.create_ssl_context() if is_encrypted else True,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(None, sock_connect=CONNECT_TIMEOUT_S),
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    @property
    def limits(self) -> BodyLimits:
        """See ``Backend``."""
        return BodyLimits(self._options.max_line_bytes, _MAX_VALUES, _MAX_VALUES, _MAX_VALUES)

    @property
    def stalled_by(self) -> str | None:
        """See ``Backend``."""
        return self._reason

    def load(self) -> BackendLoad:
        """See ``Backend``."""
        return BackendLoad(
            self._rate.per_s(),
            total_tokens=self._rate.total_tokens,
            max_in_flight=self._options.concurrency,
        )

    async def watch(self, seconds: float) -> None:
        """Wait for so long, or until the server is given up.

        Raises:
            ServerError: the server is given up.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_given_up.wait()
        if self._error is not None:
            raise self._error

    async def run(
        self, request: LineRequest, _on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        """See ``Backend``."""
        if request.body.get("stream"):
            return LineResult.refused(400, "a batch line cannot stream: remove stream")
        async with self._places:
            began_s = time.monotonic()
            try:
                with self._rate.in_flight():
                    result = await self._attempt(request)
                    self._rate.add(usage_of(result.body).total_tokens)
            except ServerError as error:
                self._give_up(error)
                return LineResult.unserved("refused", str(error), FailureKind.UNAVAILABLE)
            self._note(request.line, result, began_s, time.monotonic())
            return result

    async def _attempt(self, request: LineRequest) -> LineResult:
        """Return the answer to one POST.

        Raises:
            ServerError: every line would be refused.
        """
        content = _offline_body(request.body)
        url = f"{self._address}".rstrip("/") + request.endpoint
        timeout_s = self._options.request_timeout_s
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.post(url, data=content, allow_redirects=False) as answer,
            ):
                longest_pause_s = self._options.retry_policy.retry_for_s
                return _result(answer, await answer.read(), longest_pause_s)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            cause = str(error.__cause__ or "") or error
            reason = f"cannot connect to {self._address.netloc.decode()}: {cause}"
            return LineResult.unserved("unreachable", reason, FailureKind.UNREACHABLE)
        except (aiohttp.ClientError, ConnectionError) as error:
            # Some of these errors have no text of their own.
            reason = f"connection lost: {str(error) or type(error).__name__}"
            return LineResult.unserved("connection_lost", reason, FailureKind.LOST)
        except TimeoutError:
            reason = f"no answer within {timeout_s:g} s"
            return LineResult.unserved("request_timeout", reason, FailureKind.TIMED_OUT)

    def _note(self, line: int, result: LineResult, began_s: float, now_s: float) -> None:
        """Note whether the server was there, by what came of an attempt."""
        policy = self._options.retry_policy
        if not result.is_retryable or result.kind is FailureKind.FAILED:
            self._outages.clear()
            self._reason = None
            return
        # A server that held the line for so long was there.
        if result.kind is FailureKind.LOST and now_s - began_s >= policy.retry_for_s:
            self._outages.pop(line, None)
        if line not in self._outages:
            self._outages[line] = Outage(policy, random.Random(), server=f"{self._address}")
        self._reason = error_message(result.body)
        if result.status_code:
            self._reason = f"HTTP {result.status_code}: {self._reason}"
        try:
            self._outages[line].failed(self._reason, now_s)
        except ServerGoneError as error:
            self._give_up(error)

    def _give_up(self, error: ServerError) -> None:
        self._error = self._error or error
        self._is_given_up.set()


def _kept_alive(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SILENT_PEER:
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def _offline_body(body: dict[str, Any]) -> bytes:
    """Return a body to send, in the offline class unless the line chose one itself."""
    if body.get("service_tier") is None and body.get("coserve_class") is None:
        body["service_tier"] = "flex"
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _result(answer: aiohttp.ClientResponse, content: bytes, longest_pause_s: float) -> LineResult:
    """Return what an answer says.

    Raises:
        ServerError: every line would be refused.
    """
    body: Any
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = content.decode(answer.get_encoding(), "replace")
    status = answer.status
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
        pause_s = min(pause_s, longest_pause_s)
        return LineResult(status, request_id, body, True, FailureKind.UNAVAILABLE, pause_s)
    is_success = status // 100 == 2
    if is_success and _is_aborted(body):
        reason = "the server aborted the request"
        return LineResult.unserved("aborted", reason, FailureKind.FAILED)
    if is_success and not isinstance(body, dict):
        return LineResult.unserved("invalid_response", "the answer is not a JSON object")
    return LineResult(status, request_id, body, is_retryable=status // 100 == 5)


def _is_aborted(body: object) -> bool:
    """SGLang answers an aborted request with 200 and the text it had by then."""
    match body:
        case {"choices": [*choices]}:
            return any(
                isinstance(choice, dict) and choice.get("finish_reason") == "abort"
                for choice in choices
            )
    return False
