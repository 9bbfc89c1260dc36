"""The service that the routes of an application call."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Request

from sglang_coserve.batch.errors import BatchApiNotReadyError, BatchApiOffError
from sglang_coserve.batch.service import BatchService
from sglang_coserve.errors import StorageError
from sglang_coserve.web.keys import EVERYBODY, owner_of
from sglang_coserve.web.routes import tell_failures

_SERVICE: Final = "coserve_batch_service"
"""Where an application has the service of its routes, or the reason why there is none."""

_OFF: Final = (
    "the Batch API is off: start the server with --coserve-data-dir DIRECTORY, where it keeps "
    "files and batches"
)


def set_service(app: FastAPI, service: BatchService) -> None:
    """Set the service of ``app``'s routes."""
    setattr(app.state, _SERVICE, service)
    tell_failures(app, service.context.directory.told)


def find_service(app: FastAPI) -> BatchService:
    """Return the service of ``app``'s routes.

    Raises:
        BatchApiOffError: nothing.
    """
    service = getattr(app.state, _SERVICE, None) or BatchApiOffError(_OFF)
    if isinstance(service, BatchApiOffError):
        raise service
    assert isinstance(service, BatchService)
    return service


def set_not_ready(app: FastAPI, why: str) -> None:
    """Say why the routes of ``app`` serve nothing now. A client that asks again later may get an
    answer."""
    setattr(app.state, _SERVICE, BatchApiNotReadyError(why))


async def batch_api_status(app: FastAPI) -> dict[str, Any] | None:
    """Return the ``ServiceStatus`` in plain values; None while the Batch API is off.

    If the disk has failed, there is an ``error`` alone, and the rest of the server's status is
    still answered.
    """
    try:
        return asdict(await find_service(app).status())
    except BatchApiNotReadyError as error:
        return {"not_ready": str(error)}
    except BatchApiOffError:
        return None
    except StorageError as error:
        return {"error": find_service(app).context.directory.told(error)}


async def take_over(service: BatchService, api_key: str | None) -> None:
    """Move what the key owns by itself to the owner that all callers share.

    Nothing is moved without a key.
    """
    if api_key:
        await service.move_owner(owner_of(api_key), EVERYBODY)


def _service(request: Request) -> BatchService:
    return find_service(request.app)


Service = Annotated[BatchService, Depends(_service)]
"""The service that a route calls."""
