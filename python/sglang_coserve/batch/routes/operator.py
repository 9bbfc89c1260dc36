"""``/coserve/batches``: everybody's batches, for who has the server's admin key."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from sglang_coserve.asgi import bearer_key, is_same_key
from sglang_coserve.batch.record import Status
from sglang_coserve.batch.routes.caller import Service
from sglang_coserve.batch.routes.errors import (
    ERROR_RESPONSES,
    OPERATOR_ERROR_RESPONSES,
    AdminKeyError,
    JsonRoute,
    NoAdminKeyError,
)
from sglang_coserve.batch.schemas import BatchList, BatchObject

_STATE: Final = "coserve_admin_key"


def set_admin_key(app: FastAPI, key: str) -> None:
    """Let who brings ``key`` use the routes; before that nobody can."""
    assert key
    setattr(app.state, _STATE, key)


def check_admin_key(
    request: Request,
    _documented: Annotated[
        HTTPAuthorizationCredentials | None,
        Depends(HTTPBearer(auto_error=False, scheme_name="admin key")),
    ],
) -> None:
    """Let a request pass that brings the admin key.

    Raises:
        NoAdminKeyError: the server has none.
        AdminKeyError: the request brings another one, or none.
        RequestError: it brings several.
    """
    key = getattr(request.app.state, _STATE, None)
    if key is None:
        raise NoAdminKeyError(
            "the operator's routes are off: start the server with --admin-api-key KEY"
        )
    if not is_same_key(bearer_key(request.scope["headers"]), key):
        raise AdminKeyError("send the server's --admin-api-key as a bearer token")


def operator_router(
    prefix: str = "", *, tag: str = "operator", route_class: type[APIRoute] = JsonRoute
) -> APIRouter:
    """Return a router whose routes need the admin key."""
    return APIRouter(
        prefix=prefix,
        tags=[tag],
        route_class=route_class,
        responses=ERROR_RESPONSES | OPERATOR_ERROR_RESPONSES,
        dependencies=[Depends(check_admin_key)],
    )


def endpoints_of(router: APIRouter) -> list[Any]:
    """Return the functions behind the routes."""
    return [route.endpoint for route in router.routes if isinstance(route, APIRoute)]


router = operator_router("/coserve/batches")

BatchId = Annotated[str, Path(max_length=64)]


@router.get("")
async def list_all_batches(
    service: Service,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    owner: Annotated[str | None, Query(max_length=64)] = None,
    status: Status | None = None,
) -> BatchList:
    """List the batches of all keys, or of one ``owner``, the newest first."""
    return await service.list_batches(owner, after=after, limit=limit, status=status)


@router.get("/{batch_id}")
async def retrieve_any_batch(service: Service, batch_id: BatchId) -> BatchObject:
    """Look at anybody's batch."""
    return await service.retrieve_batch(None, batch_id)


@router.post("/{batch_id}/cancel")
async def cancel_any_batch(service: Service, batch_id: BatchId) -> BatchObject:
    """Cancel anybody's batch; what is finished stays its owner's."""
    return await service.change_batch(None, batch_id, "cancel")


@router.post("/{batch_id}/pause")
async def pause_any_batch(service: Service, batch_id: BatchId) -> BatchObject:
    """Take anybody's batch out of the engine until it is resumed; its window goes on."""
    return await service.change_batch(None, batch_id, "pause")


@router.post("/{batch_id}/resume")
async def resume_any_batch(service: Service, batch_id: BatchId) -> BatchObject:
    """Let anybody's paused batch go on."""
    return await service.change_batch(None, batch_id, "resume")
