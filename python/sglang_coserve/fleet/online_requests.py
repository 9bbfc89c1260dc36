"""Online requests that come to a gateway: they go on to a router, or are told where it is.

What passes is not changed and not gathered: a token goes on when it comes, and whoever hangs up
is gone for the router, too. With pools, relaxed engines may compute prompts first (OOCO's push).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, Self

import aiohttp
import msgspec
from multidict import CIMultiDict
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from sglang_coserve.asgi import ENGINE_PATHS, OBJECTIVE_HEADERS, openai_error, send_json
from sglang_coserve.errors import RequestError, ServerError
from sglang_coserve.fleet.backend import FleetBackend
from sglang_coserve.jsonl.body_limits import check_body
from sglang_coserve.jsonl.request_line import BadLineError, parse_json
from sglang_coserve.lines.backend import LineMovedError, LineRequest, MovedKv

ONLINE_PATHS: Final = (
    *ENGINE_PATHS,
    *("/v1/audio/translations", "/rerank"),
    *("/v1/tokenize", "/v1/detokenize", "/tokenize", "/detokenize"),
)
"""What goes on, with what is below it: never what a router's operator does."""

_CONNECT_TIMEOUT_S: Final = 5.0
_KEEPALIVE_S: Final = 2.0
"""Shorter than that of any router, which would close a connection that is just being used."""

_OF_ONE_CONNECTION: Final = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade", b"host", b"expect"),
    )
)
"""Headers that are for the next hop alone (RFC 9110, 7.6.1), or that each hop says itself."""

_REQUEST_ID: Final = b"x-request-id"
"""Of an answer: the gateway says it of every answer, as it is sent to the router."""

_METHODS: Final = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")

_log = logging.getLogger(__name__)


class _BrokenAnswerError(ServerError):
    """The router's answer ended before its end: the client's has to break, too."""


_PUSHED_PATHS: Final = ("/v1/completions", "/v1/chat/completions")

_PUSH_TIMEOUT_S: Final = 5.0
"""Longest that a request waits for a relaxed engine to compute its prompt."""

_NOT_OF_A_PROMPT: Final = ("stream", "stream_options", "service_tier", "custom_params")
_MARK: Final = "coserve_"


class PromptPush:
    """Has relaxed engines compute the prompts of online requests, and leave their KV."""

    def __init__(self, fleet: FleetBackend, offline_objectives: Sequence[str]) -> None:
        """``offline_objectives``: see ``--offline-objectives`` of an engine."""
        self._fleet = fleet
        self._offline_objectives = offline_objectives
        self._under_way: Counter[str] = Counter()
        """By engine."""

    def takes(self, scope: Scope) -> bool:
        """Return whether a request may have a prompt to compute, and is not too large to gather."""
        length_bytes = dict(scope["headers"]).get(b"content-length", b"")
        return (
            scope["method"] == "POST"
            and scope["path"] in _PUSHED_PATHS
            and length_bytes.isdigit()
            and int(length_bytes) <= self._fleet.limits.max_bytes
        )

    async def pushed(self, scope: Scope, content: bytes) -> bytes:
        """Return the body of a request with a mark that names the KV of its prompt.

        It is unchanged where there is none, whatever the reason: the prompt is then computed where
        the request is served.
        """
        try:
            check_body(content, self._fleet.limits)
            fields = parse_json(content)
        except (RequestError, BadLineError):
            return content  # Whoever serves it says what is wrong.
        if not isinstance(fields, dict) or self._is_offline(scope, fields):
            return content
        kv = await self._left(scope["path"], fields)
        if kv is None:
            return content
        mark = msgspec.json.encode({f"{_MARK}kv": (kv.name, kv.tokens)})
        # The first field, so that the rest stays as it came.
        return mark[:-1] + b"," + content.lstrip()[1:]

    def _is_offline(self, scope: Scope, fields: Mapping[str, Any]) -> bool:
        """Return what an engine will make of a request; a gateway's header overrides its body."""
        headers = dict(scope["headers"])
        named = next((headers[name] for name in OBJECTIVE_HEADERS if name in headers), b"")
        if objective := named.decode("latin-1").strip():
            return any(fnmatchcase(objective, each) for each in self._offline_objectives)
        params = fields.get("custom_params")
        within = params if isinstance(params, dict) else {}
        is_marked = "offline" in (each.get(f"{_MARK}class") for each in (fields, within))
        return fields.get("service_tier") == "flex" or is_marked

    async def _left(self, path: str, fields: Mapping[str, Any]) -> MovedKv | None:
        """Return what a relaxed engine has left of a request; None if nothing in time."""
        fleet = self._fleet
        relaxed = [e for e in fleet.engines if e.pool == "relaxed" and e.model == fleet.model]
        if not relaxed:
            return None
        engine = min(relaxed, key=lambda each: self._under_way[each.url])
        left_out = {name for name in fields if name.startswith(_MARK)}.union(_NOT_OF_A_PROMPT)
        body = {name: value for name, value in fields.items() if name not in left_out}
        prompt = LineRequest("", 0, path, body, only_prompt=True)
        self._under_way[engine.url] += 1
        try:
            async with asyncio.timeout(_PUSH_TIMEOUT_S):
                result = await engine.connection.run(prompt, fleet.model, lambda _: None)
            _log.debug("%s has left no KV: HTTP %d", engine.url, result.status_code)
        except LineMovedError as error:
            fleet.prompts_pushed += error.kv is not None
            return error.kv
        except (TimeoutError, ServerError) as error:
            _log.warning("a prompt is computed where it is served: %s", error or engine.url)
        finally:
            self._under_way[engine.url] -= 1
        return None


class RouterConnection:
    """Passes requests on to the router at ``url``. A context manager."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.push: PromptPush | None = None
        """What computes prompts first; None: nobody does."""

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(None, sock_connect=_CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI request."""
        if ".." in scope["path"].split("/"):
            # Whoever resolves it would have another path, maybe one of the router's operator.
            refusal = openai_error(404, "a path has no '..' here: write it without", "not_found")
            await send_json(send, 404, refusal)
            return
        body = _RequestBody(receive)
        passing = asyncio.create_task(self._pass_on(scope, body, send))
        leaving = asyncio.create_task(body.client_left())
        try:
            await asyncio.wait((passing, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (passing, leaving):
                task.cancel()
            ends = await asyncio.gather(passing, leaving, return_exceptions=True)
        if isinstance(ends[0], Exception):
            raise ends[0]

    async def _pass_on(self, scope: Scope, body: _RequestBody, send: Send) -> None:
        path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
        query = scope["query_string"].decode("latin-1")
        url = URL(f"{self.url}{path}{'?' if query else ''}{query}", encoded=True)
        headers = CIMultiDict(
            (name.decode("latin-1"), _sendable(value)) for name, value in _kept(scope["headers"])
        )
        has_body = any(
            name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"]
        )
        data: AsyncIterator[bytes] | bytes | None = body.pieces() if has_body else None
        if not has_body:
            await body.skip()
        elif self.push is not None and self.push.takes(scope):
            whole = b"".join([piece async for piece in body.pieces()])
            data = await self.push.pushed(scope, whole)
            headers["content-length"] = str(len(data))
        has_begun = False
        try:
            async with self._session.request(
                scope["method"],
                url,
                headers=headers,
                data=data,
                allow_redirects=False,
            ) as answer:
                has_begun = True
                await send(
                    {
                        "type": "http.response.start",
                        "status": answer.status,
                        "headers": _kept(answer.raw_headers, _REQUEST_ID),
                    }
                )
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            if has_begun:
                raise _BrokenAnswerError(f"{url} broke its answer off: {reason}") from None
            _log.warning("%s cannot be reached: %s", self.url, reason)
            message = f"the router {self.url} cannot be reached now: {reason}"
            refusal = openai_error(503, message, "router_unreachable")
            await send_json(send, 503, refusal, {"retry-after": "1"})


class _RequestBody:
    """What a client sends, and the end of its connection."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_read = asyncio.Event()
        self._has_left = asyncio.Event()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._has_left.set()
                await asyncio.Event().wait()  # Until this request is cancelled.
            yield message.get("body", b"")
            if not message.get("more_body", False):
                self._is_read.set()
                return

    async def skip(self) -> None:
        """Read an empty body."""
        async for _ in self.pieces():
            pass

    async def client_left(self) -> None:
        """Wait until nobody reads the answer any more."""
        read, left = (asyncio.create_task(each.wait()) for each in (self._is_read, self._has_left))
        try:
            await asyncio.wait((read, left), return_when=asyncio.FIRST_COMPLETED)
            while not self._has_left.is_set():
                message: Message = await self._receive()
                if message["type"] == "http.disconnect":
                    self._has_left.set()
        finally:
            read.cancel()
            left.cancel()


class _NoRouter:
    """Says where online requests go."""

    def __init__(self, known_router: str | None) -> None:
        where = f"the router {known_router}" if known_router else "the router before the engines"
        self._message = (
            f"only files and batches are served here: send online requests to {where}, or start the"
            f" gateway with --router {known_router or 'URL'}, to which it passes them on"
        )

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_json(send, 404, openai_error(404, self._message, "not_found"))


def online_routes(router: RouterConnection | None, known_router: str | None) -> list[Route]:
    """Return the routes of online requests; ``known_router`` is named where there is none."""
    endpoint: Any = router or _NoRouter(known_router)
    return [
        Route(path + below, endpoint, methods=_METHODS, include_in_schema=False)
        for path in ONLINE_PATHS
        for below in ("", "/{below:path}")
    ]


def _sendable(value: bytes) -> str:
    """Return what aiohttp, which writes UTF-8, sends as ``value``; what is none is Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _kept(headers: Sequence[tuple[bytes, bytes]], *also: bytes) -> list[tuple[bytes, bytes]]:
    """Return ``headers`` but those of one connection and ``also``."""
    named = {
        each.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for each in value.split(b",")
    }
    dropped = _OF_ONE_CONNECTION | named | frozenset(also)
    return [(name, value) for name, value in headers if name.lower() not in dropped]
