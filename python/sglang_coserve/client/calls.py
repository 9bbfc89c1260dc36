"""Calls to a server: its address, when a call is tried again, and what a refusal says."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, Self, TypeVar

import httpx2

from sglang_coserve.errors import RequestError, ServerError, ServerGoneError
from sglang_coserve.lines.background import backoff_s
from sglang_coserve.lines.serve_line import RetryPolicy
from sglang_coserve.network import check_key, http_address

CONNECT_TIMEOUT_S: Final = 10.0

_PASSING: Final = frozenset({408, 429, 502, 503, 504})
_LASTING_CODES: Final = frozenset({"insufficient_quota"})
"""Codes of errors that retrying does not help, in spite of their status."""

_UNSENT_BYTES: Final = 1 << 17
"""Two chunks of an upload: one on its way, and the next one."""

_T = TypeVar("_T")


def server_address(base_url: str, api_key: str | None) -> tuple[httpx2.URL, dict[str, str]]:
    """Return where a server is, and the headers that every call to it has.

    Raises:
        ConfigError: the address or the key cannot be used.
    """
    check_key("the API key", api_key)
    # With /v1 and without are both common; the urls of the lines begin with /v1.
    root = base_url.rstrip("/").removesuffix("/v1")
    address = http_address(root, "server", may_have_login=True)
    if not address.userinfo:
        return address, {"authorization": f"Bearer {api_key}"} if api_key else {}
    # In the header that a key would have, and not in the address, which messages name.
    login = b64encode(f"{address.username}:{address.password}".encode()).decode()
    return address.copy_with(userinfo=b""), {"authorization": f"Basic {login}"}


class Outage:
    """How long a call has got nowhere, over all its attempts.

    A call gets further when a byte goes beyond those of every earlier attempt, up or down: that
    ends an outage. Bytes that an earlier attempt had carried, too, show only that the server is
    there: no time counts while they flow, but the outage is not over. So a slow transfer goes on
    however often it breaks, and one that always breaks at the same byte is given up. Nor does time
    count before the first failure: a call in service proves no outage.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        rng: random.Random,
        furthest_bytes: int = 0,
        *,
        server: str = "the server",
    ) -> None:
        """``furthest_bytes`` are there before the first attempt; errors name the ``server``."""
        self._policy = policy
        self._rng = rng
        self._server = server
        self._furthest_bytes = furthest_bytes
        self._failures = 0
        """Since the call last got further."""

        self._down_s = 0.0
        """Of this outage, before ``_silent_since_s``."""

        self._silent_since_s = 0.0
        self._is_flowing = False

    def reached(self, position_bytes: int, now_s: float) -> None:
        """Note that the bytes before this position of the file or body have come through."""
        if position_bytes > self._furthest_bytes:
            self._furthest_bytes = position_bytes
            self._failures, self._down_s = 0, 0.0
        elif self._failures and not self._is_flowing:
            self._down_s += now_s - self._silent_since_s
        self._is_flowing, self._silent_since_s = True, now_s

    def failed(self, reason: str, now_s: float) -> float:
        """Return the wait in seconds before the next attempt, after one has failed.

        Raises:
            ServerGoneError: the call has got nowhere for ``retry_for_s``.
        """
        if not self._failures:
            self._silent_since_s = now_s
        self._is_flowing = False
        policy = self._policy
        left_s = policy.retry_for_s - self._down_s - (now_s - self._silent_since_s)
        if left_s <= 0:
            has_tls = self._server.startswith("https:")
            hint = "is the server there, and with https?" if has_tls else "is the server there?"
            raise ServerGoneError(
                f"nothing new has come from {self._server} for {policy.retry_for_s:g} s ({reason}):"
                f" {hint} --base-url says which"
            )
        self._failures += 1
        pause_s = backoff_s(self._failures, policy.first_delay_s, policy.max_delay_s, self._rng)
        return min(pause_s, left_s)


class Caller:
    """Calls one server. A call that fails for a reason that may pass, as while the server starts,
    is retried until it has got nowhere for ``retry_for_s``: see ``Outage``.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        policy: RetryPolicy,
        stall_s: float,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """An attempt has failed when no byte of it has moved for ``stall_s``.

        Raises:
            ConfigError: the address or the key cannot be used.
        """
        address, headers = server_address(base_url, api_key)
        self._http = httpx2.AsyncClient(
            base_url=address,
            headers=headers,
            timeout=httpx2.Timeout(stall_s, connect=CONNECT_TIMEOUT_S),
            transport=transport
            or httpx2.AsyncHTTPTransport(
                # The authorities of the environment count, and its proxies do not.
                verify=httpx2.create_ssl_context(),
                trust_env=False,
                socket_options=_little_unsent(),
            ),
            trust_env=False,
        )
        self._policy = policy
        self._rng = random.Random()
        self.last_failure: str | None = None
        """Why a call is being retried; None while the server answers."""

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _call(self, method: str, url: str, **request: Any) -> dict[str, Any]:
        """Return the JSON object that a call answers; ``request`` is as httpx2 takes it.

        Raises:
            ServerGoneError: the server cannot be reached.
            RequestError: it says that the call is wrong.
            ServerError: it refuses the key, or answers with something else.
        """
        return json_object(await self._answer(method, url, **request))

    async def _answer(self, method: str, url: str, **request: Any) -> httpx2.Response:
        """Return the first answer that trying again would not change."""
        return await self._retried(
            lambda _: self._attempt(self._http.build_request(method, url, **request))
        )

    async def _attempt(self, request: httpx2.Request) -> httpx2.Response:
        answer = await self._http.send(request)
        _raise_if_passing(answer)
        self.last_failure = None
        return answer

    async def _retried(
        self, attempt: Callable[[Outage], Awaitable[_T]], furthest_bytes: int = 0
    ) -> _T:
        """Return what ``attempt`` does, which is tried again until it has got nowhere for too long.

        Raises:
            ServerGoneError: it has.
        """
        server = f"{self._http.base_url}"
        outage = Outage(self._policy, self._rng, furthest_bytes, server=server)
        while True:
            try:
                return await attempt(outage)
            except _PassingError as error:
                reason = str(error)
            except httpx2.RequestError as error:  # Also of content that is not what it says it is.
                reason = str(error) or type(error).__name__
            self.last_failure = reason
            await asyncio.sleep(outage.failed(reason, time.monotonic()))

    def _noting(self, outage: Outage) -> Callable[[int], None]:
        """Return what is to be called with the position of each byte that has come through."""

        def note(position_bytes: int) -> None:
            outage.reached(position_bytes, time.monotonic())
            self.last_failure = None

        return note


def _little_unsent() -> list[tuple[int, int, int]]:
    """Let little wait to be sent. The system would keep megabytes, and take the next chunk only
    when a third of them has gone: on a slow link an upload would seem to stand still."""
    if not hasattr(socket, "TCP_NOTSENT_LOWAT"):
        return []
    return [(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)]


class _PassingError(Exception):
    """The same call may be answered otherwise later."""


def _raise_if_passing(answer: httpx2.Response) -> None:
    """Raise ``_PassingError`` for an answer that retrying may change."""
    if answer.status_code in _PASSING and _error(answer).get("code") not in _LASTING_CODES:
        raise _PassingError(f"HTTP {answer.status_code}: {error_message(answer)}")


class RefusedError(RequestError):
    """The server says that the call is wrong; ``code`` is its word for what is."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.code = code


class KeyRefusedError(ServerError):
    """The server refuses the key; ``reason`` is what it says."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the server refuses the API key ({reason}): check --api-key or COSERVE_API_KEY"
        )
        self.reason = reason


def raise_if_refused(answer: httpx2.Response) -> None:
    """Raise for an answer that is no success, for ``Caller`` what may pass by trying again."""
    status = answer.status_code
    if answer.is_success:
        return
    _raise_if_passing(answer)
    reason = f"HTTP {status}: {error_message(answer)}"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise KeyRefusedError(reason)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise ServerError(reason)
    if not _error(answer):
        raise RequestError(f"HTTP {status}: {unusable(answer, 'answer of a Batch API')}")
    raise RefusedError(reason, _error(answer).get("code"))


def json_object(answer: httpx2.Response) -> dict[str, Any]:
    """Return the JSON object in an answer that refuses nothing.

    Raises:
        RequestError, ServerError: it refuses, or is no object, as that of a proxy's page.
    """
    raise_if_refused(answer)
    try:
        content = answer.json()
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise unusable(answer, "JSON object")
    return content


def unusable(answer: httpx2.Response, wanted: str) -> ServerError:
    """Return the error for an answer that is not what was ``wanted``."""
    return ServerError(
        f"{answer.url} has answered with {answer.text[:80]!r}, which is no {wanted}: is that the"
        " address of the server? One without a Batch API is used with --no-batch"
    )


def _error(answer: httpx2.Response) -> Mapping[str, Any]:
    try:
        content = json.loads(answer.content)
        # SGLang's own errors have no object around them.
        error = content if content.get("object") == "error" else content["error"]
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return {}
    return error if isinstance(error, dict) else {"message": error}


def error_message(answer: httpx2.Response) -> str:
    """Return what an answer that is no success says."""
    return str(_error(answer).get("message") or answer.text[:500])
