"""Responses in the background. Others are the application's own."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Path, Request, Response
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from sglang_coserve.batch.errors import BatchApiNotReadyError, BatchApiOffError
from sglang_coserve.batch.file_store import Transfers
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.responses.responses import (
    ID_PREFIX,
    RESPONSES,
    BackgroundResponses,
    no_stream,
)
from sglang_coserve.batch.responses.schemas import CreateResponse, ResponseDeleted
from sglang_coserve.batch.routes.service import Service, find_service
from sglang_coserve.batch.routes.transfers import received
from sglang_coserve.errors import RequestError
from sglang_coserve.jsonl.body_limits import BodyLimits, BodyTooLargeError, check_body
from sglang_coserve.lines.result_record import encode_json
from sglang_coserve.web.asgi import openai_error, replay, route_path, send_error, send_json
from sglang_coserve.web.errors import ApiError
from sglang_coserve.web.keys import Owner, caller_owner
from sglang_coserve.web.routes import ERROR_RESPONSES, OpenAIRoute

_OUR_PATH: Final = re.compile(f"{RESPONSES}/{ID_PREFIX}[0-9a-f]{{24}}(/cancel)?")
"""SGLang's ids have 32 digits."""

_MAX_BYTES: Final = 64 << 20
"""Of a body that may turn out to be somebody else's."""

_MOST_UNREAD_BYTES: Final = 1 << 30
"""Most bytes of all clients' bodies together, which are read whole to find out whose they are."""

_UNREAD: Final = "coserve_unread_responses"
"""Where an application has the bytes of these bodies."""

_SMALL_BYTES: Final = 1 << 16


class _Route(OpenAIRoute):
    """Leaves what is not in the background to the routes behind it, if there are any."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``Route``."""
        app, path = scope["app"], route_path(scope)
        is_ours = False
        if (limits := _limits(app)) is not None and path != RESPONSES:
            is_ours = _OUR_PATH.fullmatch(path) is not None
        elif limits is not None and scope["method"] == "POST":
            of_body, of_service = limits
            try:
                content = await _read(Request(scope, receive), of_service)
                is_ours = await _is_in_background(content, of_body)
            except BodyTooLargeError as error:
                await send_error(send, 413, str(error))
                return
            except ApiError as error:
                refusal = openai_error(error.status, str(error), error.code)
                await send_json(send, error.status, refusal, error.headers)
                return
            except RequestError as error:
                await send_error(send, 400, str(error))
                return
            except ClientDisconnect:
                return
            receive = replay(content, receive)
        if is_ours:
            await super().handle(scope, receive, send)
            return
        behind = (route for route in app.router.routes if not isinstance(route, _Route))
        for route in behind:
            match, child_scope = route.matches(scope)
            if match is Match.FULL:
                scope.update(child_scope)
                await route.handle(scope, receive, send)
                return
        await super().handle(scope, receive, send)


def _responses(service: Service) -> BackgroundResponses:
    return BackgroundResponses(service.context, service.files, service.runner)


Responses = Annotated[BackgroundResponses, Depends(_responses)]
ResponseId = Annotated[str, Path(max_length=64)]

router = APIRouter(
    prefix=RESPONSES, tags=["responses"], route_class=_Route, responses=ERROR_RESPONSES
)


@router.post("", response_model=None)
async def create_response(
    responses: Responses,
    owner: Owner,
    body: CreateResponse,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Response:
    """Begin it in the background; the same key and body again return the same one."""
    return await _answer(await responses.create(owner, body, idempotency_key))


@router.get("/{response_id}", response_model=None)
async def retrieve_response(
    responses: Responses, owner: Owner, response_id: ResponseId, *, stream: bool = False
) -> Response:
    """Look at it; it changes until it has ended."""
    if stream:
        raise no_stream()
    return await _answer(await responses.retrieve(owner, response_id))


@router.post("/{response_id}/cancel", response_model=None)
async def cancel_response(responses: Responses, owner: Owner, response_id: ResponseId) -> Response:
    """Cancel it; what has ended stays as it is."""
    return await _answer(await responses.cancel(owner, response_id))


@router.delete("/{response_id}")
async def delete_response(
    responses: Responses, owner: Owner, response_id: ResponseId
) -> ResponseDeleted:
    """Delete what has ended."""
    await responses.delete(owner, response_id)
    return ResponseDeleted(id=response_id)


def _limits(app: Any) -> tuple[BodyLimits, BatchLimits] | None:
    """Return the limits of a response in the background; None if there are none."""
    try:
        context = find_service(app).context
        return context.backend.limits, context.limits
    except BatchApiNotReadyError:
        return BodyLimits(), BatchLimits()
    except BatchApiOffError:
        return None


async def _read(request: Request, limits: BatchLimits) -> bytes:
    body, state = bytearray(), request.app.state
    if not hasattr(state, _UNREAD):
        setattr(state, _UNREAD, Transfers("bytes of requests", _MOST_UNREAD_BYTES))
    unread: Transfers = getattr(state, _UNREAD)
    with unread.growing(caller_owner(request)) as take:
        async for chunk in received(request.stream(), limits):
            take(len(chunk))
            body += chunk
            if len(body) > _MAX_BYTES:
                raise BodyTooLargeError(f"the request is larger than {_MAX_BYTES:,} bytes")
    return bytes(body)


async def _is_in_background(content: bytes, limits: BodyLimits) -> bool:
    if b'"background"' not in content:
        return False
    if len(content) <= _SMALL_BYTES:
        return _says_background(content, limits)
    return await asyncio.to_thread(_says_background, content, limits)


def _says_background(content: bytes, limits: BodyLimits) -> bool:
    check_body(content, limits)
    try:
        # Other encodings than UTF-8 are not ours: the limits count no values in them.
        fields = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and fields.get("background") is True


async def _answer(response: dict[str, Any]) -> Response:
    return Response(await asyncio.to_thread(encode_json, response), media_type="application/json")
