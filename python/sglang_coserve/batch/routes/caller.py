"""Dependencies of the routes: the service, and the owner who calls."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Request

from sglang_coserve.asgi import bearer_key
from sglang_coserve.batch.owners import owner_of
from sglang_coserve.batch.routes.errors import BatchApiNotReadyError, BatchApiOffError
from sglang_coserve.batch.service import BatchService
from sglang_coserve.errors import StorageError

_STATE: Final = "coserve_batch_service"
_OFF: Final = (
    "the Batch API is off: start the server with --coserve-data-dir DIRECTORY, where it keeps "
    "files and batches"
)


def set_service(app: FastAPI, service: BatchService) -> None:
    """Set the service of ``app``'s routes."""
    setattr(app.state, _STATE, service)


def find_service(app: FastAPI) -> BatchService:
    """Return the service of ``app``'s routes.

    Raises:
        BatchApiOffError: nothing.
    """
    service = getattr(app.state, _STATE, None) or BatchApiOffError(_OFF)
    if isinstance(service, BatchApiOffError):
        raise service
    assert isinstance(service, BatchService)
    return service


def set_not_ready(app: FastAPI, why: str) -> None:
    """Say why the routes of ``app`` serve nothing now; whoever asks again may have an answer."""
    setattr(app.state, _STATE, BatchApiNotReadyError(why))


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
        return {"error": str(error)}


def _service(request: Request) -> BatchService:
    return find_service(request.app)


def _owner(request: Request) -> str:
    return owner_of(bearer_key(request.scope["headers"]))


Service = Annotated[BatchService, Depends(_service)]
"""What the routes serve."""

Owner = Annotated[str, Depends(_owner)]
"""The owner who calls, from the request's key."""
