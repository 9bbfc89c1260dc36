"""Routes that answer every failed call with OpenAI's error object."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from sglang_coserve.errors import CoserveError, RequestError, StorageError
from sglang_coserve.jsonl.body_limits import (
    BodyCheck,
    BodyLimits,
    BodyNotTextError,
    BodyTooLargeError,
    mended_json,
)
from sglang_coserve.web.asgi import openai_error
from sglang_coserve.web.errors import ApiError

_JSON_LIMITS: Final = BodyLimits(1 << 20, max_values=11_000, max_objects=100, max_keys=1000)
"""A body that is no upload needs far less. The longest names 10,000 parts of one."""


class ErrorObject(BaseModel):
    """What went wrong with a call."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every answer that is not 2xx."""

    error: ErrorObject


ERROR_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status.value: {"model": ErrorResponse}
    for status in (
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.NOT_FOUND,
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.CONFLICT,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.INSUFFICIENT_STORAGE,
    )
}
"""For the OpenAPI document."""

OPERATOR_ERROR_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status.value: {"model": ErrorResponse}
    for status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
}
"""What an operator's routes answer beside these."""


_TOLD: Final = "coserve_told"

_log = logging.getLogger(__name__)


def tell_failures(app: FastAPI, told: Callable[[Exception], str]) -> None:
    """Use ``told`` to phrase failures for clients of ``app``. Without it they read "the server
    failed"."""
    setattr(app.state, _TOLD, told)


def endpoints_of(router: APIRouter) -> list[Any]:
    """Return the functions behind the routes."""
    return [route.endpoint for route in router.routes if isinstance(route, APIRoute)]


class OpenAIRoute(APIRoute):
    """A route that answers its failures itself, whatever the application does with others'."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See ``APIRoute``."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                return _invalid(error)
            except CoserveError as error:
                return _failed(error, request)
            except ClientDisconnect:
                return Response(status_code=499)  # Nobody reads it.
            except _BodyTooLarge as error:
                return _error(error.status_code, error.detail, code="body_too_large")
            except HTTPException as error:
                return _error(error.status_code, str(error.detail), code="invalid_request")

        return answer


class JsonRoute(OpenAIRoute):
    """A route whose body is short."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See ``APIRoute``."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, _Bounded(request.receive)))

        return answer


class _JsonRequest(Request):
    async def body(self) -> bytes:
        """See ``Request``; without halves of surrogate pairs, which are no text."""
        return mended_json(await super().body())


class _Bounded:
    """An ASGI ``receive`` that fails on a body beyond the limits or not in UTF-8, so that nothing
    parses it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._check = BodyCheck(_JSON_LIMITS)

    async def __call__(self) -> Message:
        message = await self._receive()
        is_last = message["type"] == "http.request" and not message.get("more_body", False)
        try:
            self._check.take(message.get("body", b""), is_last=is_last)
        except BodyTooLargeError as error:
            # FastAPI passes on an ``HTTPException`` of the body as it is; others it makes a 400.
            raise _BodyTooLarge(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error)) from None
        except BodyNotTextError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
        return message


class _BodyTooLarge(HTTPException):
    """A body of JSON is over the limit (HTTP 413)."""


def _invalid(error: RequestValidationError) -> Response:
    fault = error.errors()[0]
    # The first item says where: body, query, path or header.
    param = ".".join(map(str, fault["loc"][1:])) or None
    if fault["type"] == "json_invalid":
        return _error(400, f"the body is not valid JSON: {fault['ctx']['error']}", "invalid_json")
    message = f"{param or 'body'}: {fault['msg']}"
    return _error(HTTPStatus.BAD_REQUEST, message, code="invalid_value", param=param)


def _failed(error: CoserveError, request: Request) -> Response:
    match error:
        case ApiError():
            answer = _error(error.status, str(error), error.code, error.param)
            answer.headers.update(error.headers)
            return answer
        case RequestError():
            return _error(HTTPStatus.BAD_REQUEST, str(error), "invalid_request")
        case StorageError():
            status, code = HTTPStatus.INSUFFICIENT_STORAGE, "storage_failed"
        case _:
            status, code = HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error"
    # Here, and not where it is raised: logs have the paths of this machine.
    _log.error("%s: %s", request.url.path, error)
    told = getattr(request.app.state, _TOLD, None)
    return _error(status, "the server failed" if told is None else told(error), code)


def _error(status: int, message: str, code: str, param: str | None = None) -> Response:
    # OpenAI's client would try some of these again at once, which helps with none of them.
    headers = {"x-should-retry": "false"}
    return JSONResponse(openai_error(status, message, code, param), status, headers)
