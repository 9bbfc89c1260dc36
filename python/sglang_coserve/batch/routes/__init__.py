"""The Batch API over HTTP, as OpenAI's clients speak it: FastAPI routes without an engine.

An application takes the routes with ``add_batch_routes`` and says with ``set_service`` what
they serve; before that they answer 503. Whether a key is valid is for the application to
check; here it only says whose things are whose. Only the operator's routes check theirs, set
with ``set_admin_key``.
"""

from sglang_coserve.batch.routes.caller import (
    batch_api_status,
    find_service,
    set_not_ready,
    set_service,
)
from sglang_coserve.batch.routes.errors import BatchApiNotReadyError, BatchApiOffError
from sglang_coserve.batch.routes.operator import endpoints_of, operator_router, set_admin_key
from sglang_coserve.batch.routes.routing import (
    BATCH_PREFIXES,
    add_batch_routes,
    missing_routes,
    operator_endpoints,
)
from sglang_coserve.batch.routes.view_access import (
    PAGE_PATH,
    VIEW_PATH,
    Caller,
    Keys,
    shown_batches,
    view_answer,
)

__all__ = [
    "BATCH_PREFIXES",
    "PAGE_PATH",
    "VIEW_PATH",
    "BatchApiNotReadyError",
    "BatchApiOffError",
    "Caller",
    "Keys",
    "add_batch_routes",
    "batch_api_status",
    "endpoints_of",
    "find_service",
    "missing_routes",
    "operator_endpoints",
    "operator_router",
    "set_admin_key",
    "set_not_ready",
    "set_service",
    "shown_batches",
    "view_answer",
]
