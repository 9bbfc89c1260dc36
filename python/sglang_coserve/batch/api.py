"""The Batch API over HTTP, as OpenAI's clients speak it: FastAPI routes without an engine.

An application takes the routes with ``add_batch_routes`` and says with ``set_service`` what
they serve; before that they answer 404. The application checks keys; here a key only names the
owner of files and batches. Only the operator's routes check a key themselves, the admin key that
``set_admin_key`` sets.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from starlette.routing import Match

from sglang_coserve.batch.annex import Annex
from sglang_coserve.batch.context import EventDelivery
from sglang_coserve.batch.responses import BACKGROUND_RESPONSES
from sglang_coserve.batch.routes import batches, files, owners
from sglang_coserve.batch.uploads import UPLOADS
from sglang_coserve.batch.webhooks import WEBHOOKS
from sglang_coserve.config import BatchApiConfig
from sglang_coserve.web.routes import endpoints_of

ANNEXES: Final[tuple[Annex, ...]] = (
    BACKGROUND_RESPONSES,
    UPLOADS,
    WEBHOOKS,
)
"""Optional parts. An annex is deleted with its folder, its line here and its import above."""

_ROUTERS: Final = (
    *(files.router, batches.router),
    *(router for annex in ANNEXES for router in annex.routers),
)
_OPERATORS: Final = (batches.operators, owners.operators)

BATCH_PREFIXES: Final = tuple(router.prefix for router in _ROUTERS)
"""Beginnings of paths whose routes bound by themselves what they read of a body."""

_ENDPOINTS: Final[dict[str, Any]] = {
    "/v1/files": files.list_files,
    "/v1/batches": batches.list_batches,
    "/coserve/batches": batches.list_all_batches,
    **{path: found for annex in ANNEXES for path, found in annex.endpoints.items()},
}


def add_batch_routes(app: FastAPI) -> None:
    """Add the routes to ``app``."""
    first = [router for annex in ANNEXES for router in annex.first_routers]
    app.router.routes[:0] = [route for router in first for route in router.routes]
    # One by one, as the application's own: who looks through its routes finds them.
    for router in (*_ROUTERS, *_OPERATORS):
        app.router.routes.extend(router.routes)


def event_delivery(config: BatchApiConfig) -> EventDelivery | None:
    """Return what delivers the ends of batches; None if the settings ask for none.

    Raises:
        ConfigError: they cannot be used.
    """
    asked = (annex.event_delivery(config) for annex in ANNEXES)
    return next((delivery for delivery in asked if delivery is not None), None)


def operator_endpoints() -> list[Any]:
    """Return the functions behind the routes that need the admin key."""
    return [endpoint for router in _OPERATORS for endpoint in endpoints_of(router)]


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
