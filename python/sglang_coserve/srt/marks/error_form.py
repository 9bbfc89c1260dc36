"""Gives every refusal OpenAI's form, ``{"error": {…}}``: SGLang's own, and those without a body.

OpenAI's clients read no other form, and some say of it that there is no body. Routes of
Anthropic's and Ollama's protocols have the forms of those.

SGLang answers an invalid body with the body itself, up to eight times, and with the path of a file
of the server's. Here the answer names the faults alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import orjson
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_coserve.srt.marks.wanted_model import in_protocol_of
from sglang_coserve.told_faults import told_faults
from sglang_coserve.web.asgi import openai_error, route_path

_OWN_FORM: Final = "/v1/systemone"
"""Its protocol has a form of its own for invalid bodies."""

_KINDS: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's kinds of errors."""


def install_error_form(app: Any) -> None:
    """Install the middleware in a FastAPI application, outside of all that is added to it."""
    stock_answer = app.exception_handlers[RequestValidationError]

    async def answer(request: Any, error: Any) -> Any:
        path = route_path(request.scope)
        if path == _OWN_FORM:
            return await stock_answer(request, error)
        message, param = told_faults(error.errors())
        form = openai_error(400, message, param=param)
        return JSONResponse(in_protocol_of(path, form, _KINDS[400], message), status_code=400)

    app.add_exception_handler(RequestValidationError, answer)
    build_stack = app.build_middleware_stack
    app.build_middleware_stack = lambda: ErrorFormMiddleware(build_stack())


class ErrorFormMiddleware:
    """Stands outside of SGLang's check of keys, whose refusals have another form, too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http" or scope["method"] == "HEAD":
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _ErrorForm(send, route_path(scope)))


class _ErrorForm:
    """An ASGI ``send`` that keeps an error's answer until it is whole, and mends its form."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= HTTPStatus.BAD_REQUEST:
            self._start = message
            return
        if self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        start, self._start = self._start, None
        mended = mended_error(self._path, start["status"], self._body)
        if mended is not None:
            replaced = (b"content-length", b"content-type")
            kept = [each for each in start["headers"] if each[0].lower() not in replaced]
            length = str(len(mended)).encode()
            own = [(b"content-type", b"application/json"), (b"content-length", length)]
            start, self._body = {**start, "headers": [*kept, *own]}, mended
        await self._send(start)
        await self._send({"type": "http.response.body", "body": self._body})


def mended_error(path: str, status: int, body: bytes) -> bytes | None:
    """Return the body of an error of the route at ``path`` in its form; None if it has it."""
    try:
        content = orjson.loads(body)
    except ValueError:
        content = body.decode(errors="replace").strip() or HTTPStatus(status).phrase
    if isinstance(content, dict):
        if "success" in content:
            return None  # Some management routes say so whether something succeeded.
        if path == _OWN_FORM and "detail" in content:
            return None
        if isinstance(content.get("error"), dict):
            is_anthropics = content.get("type") == "error"
            is_openais = in_protocol_of(path, content, "", "") is content
            if "type" in content["error"] and (is_anthropics or is_openais):
                return None
            content = content["error"]
    message = _message(content)
    error = openai_error(status, message)
    if isinstance(content, dict):
        error["error"].update({k: content[k] for k in ("type", "param", "code") if content.get(k)})
    form = in_protocol_of(path, error, _KINDS.get(status, "api_error"), message)
    return None if form == content else json.dumps(form).encode()


def _message(content: Any) -> str:
    if isinstance(content, dict):
        said = next((content[k] for k in ("message", "error", "detail") if content.get(k)), content)
    else:
        said = content
    return said if isinstance(said, str) else json.dumps(said)
