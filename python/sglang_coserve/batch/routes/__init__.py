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
from sglang_coserve.batch.routes.errors import (
    ERROR_RESPONSES,
    OPERATOR_ERROR_RESPONSES,
    BatchApiNotReadyError,
    BatchApiOffError,
    JsonRoute,
)
from sglang_coserve.batch.routes.operator import check_admin_key, set_admin_key
from sglang_coserve.batch.routes.routing import (
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
    "ERROR_RESPONSES",
    "OPERATOR_ERROR_RESPONSES",
    "PAGE_PATH",
    "VIEW_PATH",
    "BatchApiNotReadyError",
    "BatchApiOffError",
    "Caller",
    "JsonRoute",
    "Keys",
    "add_batch_routes",
    "batch_api_status",
    "check_admin_key",
    "find_service",
    "missing_routes",
    "operator_endpoints",
    "set_admin_key",
    "set_not_ready",
    "set_service",
    "shown_batches",
    "view_answer",
]
