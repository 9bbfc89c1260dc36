"""What a route is called with: the service it serves, and on whose behalf."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Depends, FastAPI, Request

from sglang_coserve.batch.owners import owner_of
from sglang_coserve.batch.routes.errors import BatchApiOffError
from sglang_coserve.batch.service import BatchService

__all__ = ["Owner", "Service", "find_service", "set_service"]

_STATE: Final = "coserve_batch_service"
_OFF: Final = (
    "the Batch API is off: start the server with --coserve-data-dir DIRECTORY, where it keeps "
    "files and batches"
)


def set_service(app: FastAPI, service: BatchService | None, why_not: str = _OFF) -> None:
    """Say what the routes of ``app`` serve; without a service, what they answer instead."""
    setattr(app.state, _STATE, service or BatchApiOffError(why_not))


def find_service(app: FastAPI) -> BatchService:
    """Return what the routes of ``app`` serve.

    Raises:
        BatchApiOffError: nothing.
    """
    service = getattr(app.state, _STATE, None) or BatchApiOffError(_OFF)
    if isinstance(service, BatchApiOffError):
        raise service
    assert isinstance(service, BatchService)
    return service


def _service(request: Request) -> BatchService:
    return find_service(request.app)


def _owner(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return owner_of(key if scheme.lower() == "bearer" else None)


Service = Annotated[BatchService, Depends(_service)]
"""What the routes serve."""

Owner = Annotated[str, Depends(_owner)]
"""Who calls, by the key that came along."""
