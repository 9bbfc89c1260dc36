"""Adds the routes to an application, and checks that requests reach them."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from starlette.routing import Match

from sglang_coserve.batch.responses import RESPONSES
from sglang_coserve.batch.routes import batches, files, operator, responses, uploads

__all__ = ["BATCH_PREFIXES", "add_batch_routes", "missing_routes", "operator_endpoints"]

BATCH_PREFIXES: Final = (files.router.prefix, uploads.router.prefix, batches.router.prefix)
"""Of paths whose routes bound by themselves what they read of a body."""

_ENDPOINTS: Final = {
    "/v1/files": files.list_files,
    "/v1/batches": batches.list_batches,
    "/coserve/batches": operator.list_all_batches,
    f"{RESPONSES}/resp_{0:024x}": responses.retrieve_response,
}


def add_batch_routes(app: FastAPI) -> None:
    """Add the routes to ``app``."""
    # First, as SGLang has routes at the same paths, which get what is not in the background.
    app.router.routes[:0] = responses.router.routes
    # One by one, as the application's own: who looks through its routes finds them.
    for router in (
        *(files.router, uploads.router, uploads.part_router),
        *(batches.router, operator.router),
    ):
        app.router.routes.extend(router.routes)


def operator_endpoints() -> list[Any]:
    """Return the functions behind the routes that need the admin key."""
    return operator.endpoints_of(operator.router)


def missing_routes(app: Any) -> list[str]:
    """Name the paths at which a request to ``app`` would not reach our routes."""
    return [path for path, endpoint in _ENDPOINTS.items() if _endpoint(app, path) != endpoint]


def _endpoint(app: Any, path: str) -> Any:
    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "root_path": ""}
    for route in app.routes:
        match, child_scope = route.matches(dict(scope))
        if match is Match.FULL:
            return child_scope.get("endpoint")
    return None
