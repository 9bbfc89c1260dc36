"""Responses and chats in the background. Others are the application's own."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from sglang_coserve.asgi import replay, route_path, send_error
from sglang_coserve.batch.errors import BatchApiNotReadyError, BatchApiOffError
from sglang_coserve.batch.responses import (
    CHATS,
    ID_PREFIXES,
    RESPONSES,
    BackgroundResponses,
    endpoint_of,
)
from sglang_coserve.batch.routes.caller import Owner, Service, find_service
from sglang_coserve.batch.routes.errors import ERROR_RESPONSES, OpenAIRoute
from sglang_coserve.batch.schemas import CreateResponse, ResponseDeleted
from sglang_coserve.jsonl.body_limits import BodyLimits, BodyTooLargeError, check_body
from sglang_coserve.lines.result_record import encode_json

_OUR_PATH: Final = re.compile(
    "|".join(f"{path}/{prefix}[0-9a-f]{{24}}(/cancel)?" for path, prefix in ID_PREFIXES.items())
)
"""SGLang's ids have 32 digits."""

_MAX_BYTES: Final = 64 << 20
"""Of a body that may turn out to be somebody else's."""

_SMALL_BYTES: Final = 1 << 16
_KEEP_ALIVE_LOOKS: Final = 30
"""A comment is sent after so many half seconds without an event: proxies close silent streams."""


class _Route(OpenAIRoute):
    """Leaves what is not in the background to the routes behind it, if there are any."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``Route``."""
        app, path = scope["app"], route_path(scope)
        is_ours = False
        if (limits := _limits(app)) is not None and path not in ID_PREFIXES:
            is_ours = _OUR_PATH.fullmatch(path) is not None
        elif limits is not None and scope["method"] == "POST":
            try:
                content = await _read(Request(scope, receive))
                is_ours = await _is_in_background(content, limits)
            except BodyTooLargeError as error:
                await send_error(send, 413, str(error))
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


_STREAMED: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}}
}
ResponseId = Annotated[str, Path(max_length=64)]

router = APIRouter(tags=["responses"], route_class=_Route, responses=ERROR_RESPONSES)


@router.post(CHATS, response_model=None)
@router.post(RESPONSES, response_model=None, responses=_STREAMED)
async def create_response(
    request: Request,
    service: Service,
    owner: Owner,
    body: CreateResponse,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Response:
    """Begin it in the background; the same key and body again return the same one."""
    endpoint = route_path(request.scope)
    created = await service.responses.create(owner, body, idempotency_key, endpoint)
    return await _answer(service.responses, owner, created, streams=bool(body.stream))


@router.get(f"{CHATS}/{{response_id}}", response_model=None)
@router.get(f"{RESPONSES}/{{response_id}}", response_model=None, responses=_STREAMED)
async def retrieve_response(
    service: Service,
    owner: Owner,
    response_id: ResponseId,
    *,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """Look at it, or follow a response, after the event ``starting_after``."""
    found = await service.responses.retrieve(owner, response_id)
    streams = stream and endpoint_of(response_id) == RESPONSES
    return await _answer(service.responses, owner, found, streams=streams, after=starting_after)


@router.post(f"{CHATS}/{{response_id}}/cancel", response_model=None)
@router.post(f"{RESPONSES}/{{response_id}}/cancel", response_model=None)
async def cancel_response(service: Service, owner: Owner, response_id: ResponseId) -> Response:
    """Cancel it; what has ended stays as it is."""
    return await _answer(
        service.responses, owner, await service.responses.cancel(owner, response_id)
    )


@router.delete(f"{CHATS}/{{response_id}}")
@router.delete(f"{RESPONSES}/{{response_id}}")
async def delete_response(
    service: Service, owner: Owner, response_id: ResponseId
) -> ResponseDeleted:
    """Delete what has ended."""
    await service.responses.delete(owner, response_id)
    is_chat = endpoint_of(response_id) == CHATS
    return ResponseDeleted(
        id=response_id, object="chat.completion.deleted" if is_chat else "response"
    )


def _limits(app: Any) -> BodyLimits | None:
    """Return what a response in the background may be; None if there are none."""
    try:
        return find_service(app).context.backend.limits
    except BatchApiNotReadyError:
        return BodyLimits()
    except BatchApiOffError:
        return None


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
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
        # As FastAPI reads it: what is told to be ours must be ours.
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and fields.get("background") is True


async def _answer(
    responses: BackgroundResponses,
    owner: str,
    response: dict[str, Any],
    *,
    streams: bool = False,
    after: int = -1,
) -> Response:
    if streams:
        events = _sent_events(responses, owner, response["id"], after)
        return StreamingResponse(events, media_type="text/event-stream")
    return Response(await asyncio.to_thread(encode_json, response), media_type="application/json")


async def _sent_events(
    responses: BackgroundResponses, owner: str, response_id: str, after: int
) -> AsyncGenerator[bytes]:
    looks = 0
    async for event in responses.events(owner, response_id, after):
        if event is not None:
            yield b"event: " + event["type"].encode() + b"\ndata: " + encode_json(event) + b"\n\n"
        looks = 0 if event is not None else looks + 1
        if looks == _KEEP_ALIVE_LOOKS:
            looks = 0
            yield b": still waiting\n\n"
