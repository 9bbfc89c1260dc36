"""Keys of calls: who is a caller, and who is the operator."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from secrets import compare_digest
from typing import Annotated, Final

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from sglang_coserve.errors import RequestError
from sglang_coserve.web.errors import AdminKeyError, NoAdminKeyError
from sglang_coserve.web.routes import ERROR_RESPONSES, OPERATOR_ERROR_RESPONSES, JsonRoute

EVERYBODY: Final = "everybody"
"""The owner where no key is needed, and where all callers have the same key."""

_ONE_OWNER: Final = "coserve_one_owner"
_ADMIN_KEY: Final = "coserve_admin_key"


def bearer_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the key in ``Authorization: Bearer KEY``; None without one.

    It is the only reader of that header, so the check of a key and the owner of a call go by the
    same key.

    Args:
        headers: Of an ASGI scope.

    Raises:
        RequestError: there is more than one such header.
    """
    values = [value for name, value in headers if name.lower() == b"authorization"]
    if len(values) > 1:
        raise RequestError(f"{len(values)} Authorization headers: send one")
    scheme, _, key = values[0].partition(b" ") if values else (b"", b"", b"")
    return (key.strip().decode("latin-1") or None) if scheme.lower() == b"bearer" else None


def is_same_key(key: str | None, expected: str) -> bool:
    """Return whether a client's key is the expected one, in a time that tells nothing about it."""
    return key is not None and compare_digest(key.encode(), expected.encode())


def owner_of(api_key: str | None) -> str:
    """Return the owner behind an API key, one for all who need none.

    Keys are long and random, so a plain hash keeps them out of the database.
    """
    return sha256(api_key.encode()).hexdigest() if api_key else EVERYBODY


def set_one_owner(app: FastAPI) -> None:
    """Take all callers of ``app`` for one owner, since all have the same key."""
    setattr(app.state, _ONE_OWNER, True)


def caller_owner(request: Request) -> str:
    """Return the owner who calls, from the request's key."""
    key = bearer_key(request.scope["headers"])
    return EVERYBODY if getattr(request.app.state, _ONE_OWNER, False) else owner_of(key)


Owner = Annotated[str, Depends(caller_owner)]
"""The owner who calls, from the request's key."""


def set_admin_key(app: FastAPI, key: str) -> None:
    """Open the operator's routes to callers with ``key``. Without a key nobody can call them."""
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
