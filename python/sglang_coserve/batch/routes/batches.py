"""``/v1/batches``, and ``/coserve/batches``: everybody's, for who has the server's admin key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Response

from sglang_coserve.batch.record import Status
from sglang_coserve.batch.routes.service import Service
from sglang_coserve.batch.schemas import BatchList, BatchObject, CreateBatch
from sglang_coserve.batch.state import BatchAction
from sglang_coserve.web.keys import Owner, caller_owner, operator_router
from sglang_coserve.web.routes import ERROR_RESPONSES, JsonRoute

router = APIRouter(
    prefix="/v1/batches", tags=["batches"], route_class=JsonRoute, responses=ERROR_RESPONSES
)
operators = operator_router("/coserve/batches")

After = Annotated[str | None, Query(max_length=64)]
Limit = Annotated[int, Query(ge=1, le=100)]


@router.post("")
async def create_batch(
    service: Service,
    owner: Owner,
    body: CreateBatch,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> BatchObject:
    """Begin a batch; the same key and body again return the same batch."""
    return await service.create_batch(owner, body, idempotency_key)


@router.get("", response_model=BatchList)
async def list_batches(
    service: Service, owner: Owner, after: After = None, limit: Limit = 20
) -> Response:
    """List batches, the newest first."""
    page = await service.list_batches(owner, after=after, limit=limit)
    # Not by FastAPI, which would check and write it on the event loop.
    return Response(await asyncio.to_thread(page.model_dump_json), media_type="application/json")


@operators.get("")
async def list_all_batches(
    service: Service,
    after: After = None,
    limit: Limit = 20,
    owner: Annotated[str | None, Query(max_length=64)] = None,
    status: Status | None = None,
) -> BatchList:
    """List the batches of all keys, or of one ``owner``, the newest first."""
    return await service.list_batches(owner, after=after, limit=limit, status=status)


def _add_actions(routes: APIRouter, owner_of: Callable[..., str | None]) -> None:
    """Add what can be done with one batch, by its owner; None is the operator."""
    owner_there: Any = Depends(owner_of)
    batch_there: Any = Path(max_length=64)

    @routes.get("/{batch_id}")
    async def retrieve_batch(
        service: Service, owner: str | None = owner_there, batch_id: str = batch_there
    ) -> BatchObject:
        """Look at a batch."""
        return await service.retrieve_batch(owner, batch_id)

    @routes.post("/{batch_id}/{action}")
    async def change_batch(
        service: Service,
        action: BatchAction,
        owner: str | None = owner_there,
        batch_id: str = batch_there,
    ) -> BatchObject:
        """Cancel a batch, pause it while its window goes on, or resume it."""
        return await service.change_batch(owner, batch_id, action)


_add_actions(router, caller_owner)
_add_actions(operators, lambda: None)
