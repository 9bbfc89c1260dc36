"""Reads the class and targets of HTTP requests, on every route that reaches the engine.

An ASGI middleware reads the marks in bodies and headers (``http_marks``),
and keeps them in a context variable while the route serves the request; the tokenizer
manager attaches them to all requests that the route sends to the scheduler.  Bodies pass
unchanged unless their route would refuse the mark, and are not even parsed unless they contain the
name of one.  The response
names the class; those of OpenAI routes also name the tier used.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import RequestError
from sglang_coserve.srt.marks.answers import OverloadAnswer, TierWriter
from sglang_coserve.srt.marks.http_marks import (
    SERVICE_TIER,
    is_bulk,
    marks_of_body,
    marks_of_headers,
    priority_in,
    tier_used,
)
from sglang_coserve.srt.marks.request_marks import CLASS_KEY, MARK_PREFIX, said_by_client
from sglang_coserve.web.asgi import (
    ENGINE_PATHS,
    is_form,
    known_paths,
    replay,
    route_path,
    send_error,
)

_OPENAI_PATHS: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
"""Routes whose answers have a ``service_tier``."""

MARKED_PATHS: Final = frozenset(known_paths(ENGINE_PATHS))
"""Routes whose requests may be marked."""

CLASS_HEADER: Final = "x-coserve-class"
"""Response header with the class of a request, if the request named one."""

# Two searches for a substring are much faster than one regular expression.
_NAMES: Final = (MARK_PREFIX.encode(), SERVICE_TIER.encode(), b'"background"')

_UNKNOWN_TO_SGLANG: Final = ("fast", "standard_only")
"""Tiers that SGLang's ``/v1/responses`` refuses."""

STRICT_PATHS: Final = ("/v1/decisions",)
"""Routes that refuse fields that they do not know."""


class MarksMiddleware:
    """Stands behind what bounds a body and puts it together; see the module's docstring."""

    def __init__(
        self,
        app: ASGIApp,
        offline_objectives: Iterable[str] = (),
        offline_priority_below: float | None = None,
    ) -> None:
        """Wrap ``app``.

        ``offline_objectives`` are values of a gateway's header that make a request offline; ``*``
        stands for any text. So does a priority below ``offline_priority_below``.
        """
        self._app = app
        patterns = [fnmatch.translate(each) for each in offline_objectives]
        self._below = offline_priority_below
        self._names = _NAMES if offline_priority_below is None else (*_NAMES, b'"priority"')
        self._is_offline = re.compile("|".join(patterns) or r"(?!)").match

    def _is_low(self, scope: Scope, fields: Mapping[str, Any]) -> tuple[bool, bool]:
        """Return whether a request's priority makes it offline, and whether a header says it."""
        if self._below is None:
            return False, False
        priority, is_from_gateway = priority_in(scope["headers"], fields)
        return priority is not None and priority < self._below, is_from_gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        path = route_path(scope).rstrip("/") if scope["type"] == "http" else ""
        if path not in MARKED_PATHS or scope["method"] not in ("POST", "PUT"):
            await self._app(scope, receive, send)
            return
        try:
            hints = marks_of_headers(scope["headers"])
            marks: dict[str, Any] = {}
            fields: Mapping[str, Any] = {}
            names_tier, is_background = path in _OPENAI_PATHS, False
            if not is_form(scope):
                body = (await receive()).get("body", b"")
                # A body without the name of a mark is not parsed.
                fields = _fields(body) if any(name in body for name in self._names) else {}
                marks = marks_of_body(fields)
                # The Batch API answers those, and names the tier itself.
                is_background = path == "/v1/responses" and fields.get("background") is True
                names_tier = names_tier and not is_background
                known = _known_to_sglang(path, fields)
                if known is not fields:
                    body = orjson.dumps(known)
                    scope = dict(scope, headers=_with_length(scope["headers"], len(body)))
                receive = replay(body, receive)
            is_low, is_from_gateway = self._is_low(scope, fields)
        except RequestError as error:
            await send_error(send, 400, str(error))
            return
        named = None
        if is_bulk(scope["headers"]) or (is_low and is_from_gateway):
            named = RequestClass.OFFLINE
        elif is_low and CLASS_KEY not in marks:
            marks[CLASS_KEY] = RequestClass.OFFLINE.value
        if hints.objective is not None:
            is_offline = self._is_offline(hints.objective)
            named = RequestClass.OFFLINE if is_offline else RequestClass.ONLINE
        if named is not None:  # A gateway's headers override the body.
            marks[CLASS_KEY] = named.value
        if CLASS_KEY in marks:
            send = _naming(send, RequestClass(marks[CLASS_KEY]), names_tier=names_tier)
        answer = OverloadAnswer(send, path)
        if is_background or marks.get(CLASS_KEY) == RequestClass.OFFLINE.value:
            answer.hear(None)  # It is never refused, and may wait for hours.
        with said_by_client(marks, hints), answer.heard():
            await self._app(scope, receive, answer)


def _naming(send: Send, request_class: RequestClass, *, names_tier: bool) -> Send:
    """Return a ``send`` that adds the class to the response."""
    inner = TierWriter(send, tier_used(request_class)) if names_tier else send
    header = (CLASS_HEADER.encode(), request_class.value.encode())

    async def naming(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = dict(message, headers=[*message["headers"], header])
        await inner(message)

    return naming


def _known_to_sglang(path: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields without marks that the route at ``path`` would refuse; themselves if it
    would refuse none."""
    if path == "/v1/responses" and fields.get(SERVICE_TIER) in _UNKNOWN_TO_SGLANG:
        return {**fields, SERVICE_TIER: "auto"}
    if path in STRICT_PATHS:
        is_mark = {name: name == SERVICE_TIER or name.startswith(MARK_PREFIX) for name in fields}
        if any(is_mark.values()):
            return {name: value for name, value in fields.items() if not is_mark[name]}
    return fields


def _fields(body: bytes) -> Mapping[str, Any]:
    """Return the fields of a JSON body. A malformed one has none here; the route reports it."""
    try:
        fields = orjson.loads(body)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]
