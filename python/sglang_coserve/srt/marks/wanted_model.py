"""Answers requests for a model that is not served with 404, whatever their route.

Of SGLang's routes most answer with the model they have, and name it as they were asked. An adapter
they take as ``MODEL:ADAPTER`` alone; its own name, which ``/v1/models`` lists, gets that form here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec
import orjson
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_coserve.jsonl.request_line import not_served, served_name
from sglang_coserve.web.asgi import ENGINE_PATHS, is_form, replay, route_path

_OLLAMA_PATHS: Final = frozenset({"/api/chat", "/api/generate", "/api/show"})
_ANTHROPIC_PATHS: Final = frozenset({"/v1/messages", "/v1/messages/count_tokens"})

_FORM_PATH: Final = "/v1/audio/transcriptions"

_WITHOUT_MODEL: Final = {"/generate", "/encode", "/classify", "/vertex_generate", _FORM_PATH}

MODEL_PATHS: Final = (frozenset(ENGINE_PATHS) - _WITHOUT_MODEL) | {
    *("/api/show", "/v1/messages/count_tokens"),
    *("/v1/tokenize", "/tokenize", "/v1/detokenize", "/detokenize"),
}
"""Routes whose JSON bodies name a model."""

_LATEST: Final = ":latest"
"""What Ollama's clients add to a name without a tag."""


class _Body(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw(b"null")


Names = Callable[[], Sequence[str]]
"""Returns what is served: the model's name, and then its adapters'."""


def check_models_of_forms(app: Any, names: Names) -> None:
    """Check the model at the route that takes it in a form, which a middleware does not read."""
    for route in app.routes:
        if getattr(route, "path", None) == _FORM_PATH:
            route.dependant.call = _checked(route.dependant.call, names)


def _checked(transcribe: Callable[..., Any], names: Names) -> Callable[..., Any]:
    async def checked(**fields: Any) -> Any:
        model, served = fields["model"], names()
        if served_name(model, served) is None:
            return _refusal(_FORM_PATH, not_served(model, served))
        return await transcribe(**fields)

    return checked


class WantedModelMiddleware:
    """Stands behind what bounds a body and puts it together; see the module's docstring."""

    def __init__(self, app: ASGIApp, names: Names) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        path = route_path(scope).rstrip("/") if scope["type"] == "http" else ""
        if path not in MODEL_PATHS or is_form(scope):
            await self._app(scope, receive, send)
            return
        message = await receive()
        body, names = message.get("body", b""), self._names()
        model = _model_in(body)
        if path in _OLLAMA_PATHS and isinstance(model, str):
            model = model.removesuffix(_LATEST) if model not in names else model
        name = served_name(model, names)
        if name is None:
            await _refusal(path, not_served(model, names))(scope, receive, send)
            return
        if model in names[1:]:
            # The last field of a name counts. All else stays as it is, odd numbers included.
            body = b'%s,"model":%s}' % (body[: body.rindex(b"}")], orjson.dumps(name))
        await self._app(scope, replay(body, receive), send)


def _model_in(body: bytes) -> Any:
    """Return the model that a body names; None for none, and for what the route will refuse."""
    try:
        return msgspec.json.decode(msgspec.json.decode(body, type=_Body).model)
    except (ValueError, RecursionError):
        return None


def _refusal(path: str, error: dict[str, str]) -> JSONResponse:
    """Return the refusal as the protocol of the route has it."""
    content = in_protocol_of(path, {"error": error}, "not_found_error", error["message"])
    return JSONResponse(content, HTTPStatus.NOT_FOUND)


def in_protocol_of(path: str, error: dict[str, Any], kind: str, message: str) -> dict[str, Any]:
    """Return ``error``, or what says the same on a route of Ollama's or of Anthropic's, which has a
    ``kind``."""
    if path in _OLLAMA_PATHS:
        return {"error": message}
    if path in _ANTHROPIC_PATHS:
        return {"type": "error", "error": {"type": kind, "message": message}}
    return error
