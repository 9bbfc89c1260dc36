"""``/coserve/lines``: for who has the server's admin key."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute

from sglang_coserve.batch.routes import BatchApiOffError, check_admin_key
from sglang_coserve.batch.routes.errors import (
    ERROR_RESPONSES,
    OPERATOR_ERROR_RESPONSES,
    OpenAIRoute,
)
from sglang_coserve.http_lines.line_server import LineServer
from sglang_coserve.http_lines.messages import LINES_PATH, encode_message

__all__ = ["add_line_routes", "line_endpoints", "set_line_server"]

_STATE: Final = "coserve_line_server"
_STARTING: Final = "the engine does not serve lines yet"

router = APIRouter(
    prefix=LINES_PATH,
    tags=["gateway"],
    route_class=OpenAIRoute,
    responses=ERROR_RESPONSES | OPERATOR_ERROR_RESPONSES,
    dependencies=[Depends(check_admin_key)],
)


def add_line_routes(app: FastAPI) -> None:
    """Add the routes to ``app``; until ``set_line_server`` they answer 503."""
    app.router.routes.extend(router.routes)


def set_line_server(app: FastAPI, server: LineServer) -> None:
    """Say what the routes of ``app`` serve lines with."""
    setattr(app.state, _STATE, server)


def line_endpoints() -> list[Any]:
    """Return the functions behind the routes, which need the admin key."""
    return [route.endpoint for route in router.routes if isinstance(route, APIRoute)]


@router.get("")
async def describe_engine(request: Request) -> Response:
    """Say what the engine serves, and whether it takes lines now."""
    description = _server(request).description()
    return Response(encode_message(description), media_type="application/json")


@router.get("/delays")
async def show_delays(request: Request) -> Response:
    """Say by how many seconds each batch has delayed online requests since the start."""
    return Response(encode_message(await _server(request).delays()), media_type="application/json")


@router.post("")
async def serve_lines(request: Request) -> Response:
    """Make attempts at lines: JSON lines in, and JSON lines out at the same time."""
    return _server(request).response()


def _server(request: Request) -> LineServer:
    server: LineServer | None = getattr(request.app.state, _STATE, None)
    if server is None:
        raise BatchApiOffError(_STARTING)
    return server
