"""The Batch API over HTTP, as OpenAI's clients speak it: FastAPI routes without an engine.

An application takes the routes with ``add_batch_routes`` and says with ``set_service`` what
they serve; before that they answer 404. Whether a key is valid is for the application to
check; here it only says whose things are whose. Only the operator's routes check theirs, set
with ``set_admin_key``.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from starlette.routing import Match

from sglang_coserve.batch.responses import CHATS, RESPONSES
from sglang_coserve.batch.routes import batches, files, responses
from sglang_coserve.batch.routes.caller import endpoints_of

BATCH_PREFIXES: Final = (files.router.prefix, files.upload_router.prefix, batches.router.prefix)
"""Of paths whose routes bound by themselves what they read of a body."""

_ENDPOINTS: Final = {
    "/v1/files": files.list_files,
    "/v1/batches": batches.list_batches,
    "/coserve/batches": batches.list_all_batches,
    f"{RESPONSES}/resp_{0:024x}": responses.retrieve_response,
    f"{CHATS}/chatcmpl-{0:024x}": responses.retrieve_response,
}


def add_batch_routes(app: FastAPI) -> None:
    """Add the routes to ``app``."""
    # First, as SGLang has routes at the same paths, which get what is not in the background.
    app.router.routes[:0] = responses.router.routes
    # One by one, as the application's own: who looks through its routes finds them.
    for router in (
        *(files.router, files.upload_router, files.part_router),
        *(batches.router, batches.operators),
    ):
        app.router.routes.extend(router.routes)


def operator_endpoints() -> list[Any]:
    """Return the functions behind the routes that need the admin key."""
    return endpoints_of(batches.operators)


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
