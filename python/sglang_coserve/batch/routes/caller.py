"""Who calls, owners and operators, and the service that is called."""

from __future__ import annotations

from dataclasses import asdict
from hashlib import sha256
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from sglang_coserve.asgi import bearer_key, is_same_key
from sglang_coserve.batch.errors import (
    AdminKeyError,
    BatchApiNotReadyError,
    BatchApiOffError,
    NoAdminKeyError,
)
from sglang_coserve.batch.routes.errors import (
    ERROR_RESPONSES,
    OPERATOR_ERROR_RESPONSES,
    SERVICE_STATE,
    JsonRoute,
)
from sglang_coserve.batch.service import BatchService
from sglang_coserve.errors import StorageError

_OFF: Final = (
    "the Batch API is off: start the server with --coserve-data-dir DIRECTORY, where it keeps "
    "files and batches"
)


def set_service(app: FastAPI, service: BatchService) -> None:
    """Set the service of ``app``'s routes."""
    setattr(app.state, SERVICE_STATE, service)


def find_service(app: FastAPI) -> BatchService:
    """Return the service of ``app``'s routes.

    Raises:
        BatchApiOffError: nothing.
    """
    service = getattr(app.state, SERVICE_STATE, None) or BatchApiOffError(_OFF)
    if isinstance(service, BatchApiOffError):
        raise service
    assert isinstance(service, BatchService)
    return service


def set_not_ready(app: FastAPI, why: str) -> None:
    """Say why the routes of ``app`` serve nothing now; whoever asks again may have an answer."""
    setattr(app.state, SERVICE_STATE, BatchApiNotReadyError(why))


async def batch_api_status(app: FastAPI) -> dict[str, Any] | None:
    """Return the ``ServiceStatus`` in plain values; None while the Batch API is off.

    Whoever watches the server is to see the rest of it also when the disk has failed:
    there is only an ``error`` then.
    """
    try:
        return asdict(await find_service(app).status())
    except BatchApiNotReadyError as error:
        return {"not_ready": str(error)}
    except BatchApiOffError:
        return None
    except StorageError as error:
        return {"error": find_service(app).context.directory.told(error)}


def _service(request: Request) -> BatchService:
    return find_service(request.app)


EVERYBODY: Final = "everybody"
"""The owner where no key is needed, and where all callers have the same key."""


def owner_of(api_key: str | None) -> str:
    """Return the owner behind an API key, one for all who need none.

    Keys are long and random, so a plain hash keeps them out of the database.
    """
    return sha256(api_key.encode()).hexdigest() if api_key else EVERYBODY


_ONE_OWNER: Final = "coserve_one_owner"


def set_one_owner(app: FastAPI) -> None:
    """Take all callers of ``app`` for one owner, since all have the same key."""
    setattr(app.state, _ONE_OWNER, True)


async def take_over(service: BatchService, api_key: str | None) -> None:
    """Give the one owner all that belongs to the key itself, as an owner of its own.

    Nothing is moved without a key.
    """
    if api_key:
        await service.move_owner(owner_of(api_key), EVERYBODY)


def caller_owner(request: Request) -> str:
    """Return the owner who calls, from the request's key."""
    key = bearer_key(request.scope["headers"])
    return EVERYBODY if getattr(request.app.state, _ONE_OWNER, False) else owner_of(key)


Service = Annotated[BatchService, Depends(_service)]
"""What the routes serve."""

Owner = Annotated[str, Depends(caller_owner)]
"""The owner who calls, from the request's key."""


_ADMIN_KEY: Final = "coserve_admin_key"


def set_admin_key(app: FastAPI, key: str) -> None:
    """Let who brings ``key`` use the routes; before that nobody can."""
    assert key
    setattr(app.state, _ADMIN_KEY, key)


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
    key = getattr(request.app.state, _ADMIN_KEY, None)
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
