"""Any OpenAI-compatible server: each line is one POST, whose answer has all tokens."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

import aiohttp
import httpx2

from sglang_coserve.errors import ServerError
from sglang_coserve.lines.backend import FailureKind, LineRequest, LineResult
from sglang_coserve.lines.result_record import error_message
from sglang_coserve.lines.serve_line import retry_after_s

_CONNECT_TIMEOUT_S: Final = 10.0

_KEEPALIVE_S: Final = 4.0
"""Shorter than the 5 s after which uvicorn closes an idle connection, so that a request seldom
meets a connection that is being closed."""

_SILENT_PEER: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""Options of TCP keep-alive by which a connection to a machine that is gone ends in two minutes."""

_UNAVAILABLE: Final = frozenset({429, 502, 503, 504})

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class PlainServer:
    """Sends lines to one server. The first line opens its session, and ``close`` closes it.

    A line may take hours, so only connecting always has a timeout; TCP keep-alive finds out when
    the machine at the other end is gone. Neither proxy settings of the environment nor cookies are
    used.
    """

    def __init__(self, address: httpx2.URL, headers: Mapping[str, str], connections: int) -> None:
        """Prepare at most so many ``connections`` to the server at ``address``.

        ``headers`` go with every request: a key, say.
        """
        self._address = address
        self._headers = {**headers, "content-type": "application/json"}
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None
        self._is_key_good = False
        """Whether a line has been served with these headers."""

        self._in_service = 0
        """Lines that the server has not answered yet."""

        self._answered = asyncio.Event()
        """Set, and replaced, when one of these has ended."""

    async def close(self) -> None:
        """Close every connection, which ends the attempts."""
        if self._session is not None:
            await self._session.close()

    async def post(
        self,
        request: LineRequest,
        *,
        timeout_s: float | None = None,
        longest_pause_s: float = math.inf,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> LineResult:
        """Return what came of one attempt at a line, in the offline class.

        Args:
            request: The line; its body is changed.
            timeout_s: Longest time for the attempt; None waits for as long as it takes.
            longest_pause_s: Longest pause before the next attempt, whatever the server asks for.
            headers: More headers of this request.

        A 403 before any line has been served waits for the other lines that the server has: one
        of them may show that the key is good, and the 403 about a single line.

        Raises:
            ServerError: the server refuses the API key, so it would refuse every line.
        """
        if self._session is None:
            self._session = self._open()
        content = _offline_body(request.body)
        url = f"{self._address}".rstrip("/") + request.endpoint
        try:
            with self._serving():
                async with (
                    asyncio.timeout(timeout_s),
                    self._session.post(
                        url, data=content, headers=headers, allow_redirects=False
                    ) as answer,
                ):
                    body = _json_or_text(answer, await answer.read())
                self._is_key_good |= answer.status // 100 == 2
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
        if await self._is_key_refused(answer.status):
            reason = f"HTTP {answer.status}: {error_message(body)}"
            raise ServerError(f"the server refuses the API key ({reason})")
        return _result(answer, body, longest_pause_s)

    def _open(self) -> aiohttp.ClientSession:
        # With 64 lines at a time, aiohttp takes 0.3 ms of CPU time for a line, httpx2 1.7 ms: its
        # pool looks at every connection whenever a connection changes.
        is_encrypted = self._address.scheme == "https"
        return aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(
                limit=self._connections,
                keepalive_timeout=_KEEPALIVE_S,
                socket_factory=_kept_alive,
                ssl=httpx2.create_ssl_context() if is_encrypted else True,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(None, sock_connect=_CONNECT_TIMEOUT_S),
        )

    @contextmanager
    def _serving(self) -> Generator[None]:
        self._in_service += 1
        try:
            yield
        finally:
            self._in_service -= 1
            self._answered.set()
            self._answered = asyncio.Event()

    async def _is_key_refused(self, status: int) -> bool:
        if status != HTTPStatus.FORBIDDEN:
            return status == HTTPStatus.UNAUTHORIZED
        while self._in_service and not self._is_key_good:
            await self._answered.wait()
        return not self._is_key_good


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


def _json_or_text(answer: aiohttp.ClientResponse, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content.decode(answer.get_encoding(), "replace")


def _result(answer: aiohttp.ClientResponse, body: Any, longest_pause_s: float) -> LineResult:
    """Return what an answer says."""
    status = answer.status
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
