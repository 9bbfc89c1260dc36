"""``/v1/batches``."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Response

from sglang_coserve.batch.routes.caller import Owner, Service
from sglang_coserve.batch.routes.errors import ERROR_RESPONSES, JsonRoute
from sglang_coserve.batch.schemas import BatchList, BatchObject, CreateBatch

router = APIRouter(
    prefix="/v1/batches", tags=["batches"], route_class=JsonRoute, responses=ERROR_RESPONSES
)

BatchId = Annotated[str, Path(max_length=64)]


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
    service: Service,
    owner: Owner,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """List batches, the newest first."""
    page = await service.list_batches(owner, after=after, limit=limit)
    # Not by FastAPI, which would check and write it on the event loop.
    return Response(await asyncio.to_thread(page.model_dump_json), media_type="application/json")


@router.get("/{batch_id}")
async def retrieve_batch(service: Service, owner: Owner, batch_id: BatchId) -> BatchObject:
    """Look at a batch."""
    return await service.retrieve_batch(owner, batch_id)


@router.post("/{batch_id}/cancel")
async def cancel_batch(service: Service, owner: Owner, batch_id: BatchId) -> BatchObject:
    """Cancel a batch; what is finished stays."""
    return await service.change_batch(owner, batch_id, "cancel")


@router.post("/{batch_id}/pause")
async def pause_batch(service: Service, owner: Owner, batch_id: BatchId) -> BatchObject:
    """Take a batch out of the engine until it is resumed; its window goes on."""
    return await service.change_batch(owner, batch_id, "pause")


@router.post("/{batch_id}/resume")
async def resume_batch(service: Service, owner: Owner, batch_id: BatchId) -> BatchObject:
    """Let a paused batch go on."""
    return await service.change_batch(owner, batch_id, "resume")
