"""``/v1/uploads``: files in parts."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Path, Request

from sglang_coserve.batch.routes.service import Service
from sglang_coserve.batch.routes.transfers import UploadForm, form_of, received
from sglang_coserve.batch.uploads.uploads import (
    CompleteUpload,
    CreateUpload,
    UploadObject,
    UploadPart,
    Uploads,
)
from sglang_coserve.web.keys import Owner
from sglang_coserve.web.routes import ERROR_RESPONSES, JsonRoute, OpenAIRoute

_UPLOADS: Final[dict[str, Any]] = {
    "prefix": "/v1/uploads",
    "tags": ["uploads"],
    "responses": ERROR_RESPONSES,
}
router = APIRouter(route_class=JsonRoute, **_UPLOADS)
part_router = APIRouter(route_class=OpenAIRoute, **_UPLOADS)
"""Routes with bodies that may be as long as a file."""


def _uploads(service: Service) -> Uploads:
    return Uploads(service.context, service.files)


Parts = Annotated[Uploads, Depends(_uploads)]
UploadId = Annotated[str, Path(max_length=64)]

_PART: Final = form_of({"data": {"type": "string", "format": "binary"}}, "data")


@router.post("")
async def create_upload(parts: Parts, owner: Owner, body: CreateUpload) -> UploadObject:
    """Begin an upload in parts."""
    return await parts.create(owner, body)


@part_router.post("/{upload_id}/parts", openapi_extra=_PART)
async def add_upload_part(
    service: Service, owner: Owner, upload_id: UploadId, request: Request
) -> UploadPart:
    """Add a part."""
    with service.uploads.one(owner):
        body = received(request.stream(), service.context.limits)
        form = UploadForm(request.headers.get("content-type", ""), body, file_field="data")
        await form.read_to_file()
        return await _uploads(service).add_part(owner, upload_id, form.file_chunks())


@router.post("/{upload_id}/complete")
async def complete_upload(
    service: Service, owner: Owner, upload_id: UploadId, body: CompleteUpload
) -> UploadObject:
    """Make a file of the parts."""
    # All of the file is read and written.
    with service.uploads.one(owner, of=upload_id):
        return await _uploads(service).complete(owner, upload_id, body)


@router.post("/{upload_id}/cancel")
async def cancel_upload(parts: Parts, owner: Owner, upload_id: UploadId) -> UploadObject:
    """Delete the parts."""
    return await parts.cancel(owner, upload_id)
