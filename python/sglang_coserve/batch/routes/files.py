"""``/v1/files``."""

from __future__ import annotations

import asyncio
import re
from contextlib import ExitStack
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

from fastapi import APIRouter, Header, Path, Query, Request, Response

from sglang_coserve.batch.errors import RangeError
from sglang_coserve.batch.routes.service import Service
from sglang_coserve.batch.routes.transfers import DownloadResponse, UploadForm, form_of, received
from sglang_coserve.batch.schemas import FileDeleted, FileList, FileObject
from sglang_coserve.web.keys import Owner
from sglang_coserve.web.routes import ERROR_RESPONSES, ErrorResponse, OpenAIRoute

_RANGE: Final = re.compile(r"bytes=(\d{1,18})?-(\d{1,18})?", re.ASCII)

router = APIRouter(
    prefix="/v1/files", tags=["files"], route_class=OpenAIRoute, responses=ERROR_RESPONSES
)

FileId = Annotated[str, Path(max_length=64)]

_UPLOAD: Final = form_of(
    {
        "purpose": {"const": "batch"},
        "file": {"type": "string", "format": "binary"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
    *("purpose", "file"),
    dependentRequired={
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
)
_BYTES: Final[dict[str, Any]] = {
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
}


@router.post("", openapi_extra=_UPLOAD)
async def create_file(service: Service, owner: Owner, request: Request) -> FileObject:
    """Upload a file."""
    with service.uploads.one(owner):
        body = received(request.stream(), service.context.limits)
        form = UploadForm(request.headers.get("content-type", ""), body)
        await form.read_to_file()
        chunks = form.file_chunks()
        return await service.create_file(owner, form.filename, chunks, form.expires_after)


@router.get("", response_model=FileList)
async def list_files(
    service: Service,
    owner: Owner,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    """List files by their creation."""
    page = await service.list_files(owner, after=after, limit=limit, order=order, purpose=purpose)
    # Not by FastAPI, which would check and write it on the event loop.
    return Response(await asyncio.to_thread(page.model_dump_json), media_type="application/json")


@router.get("/{file_id}")
async def retrieve_file(service: Service, owner: Owner, file_id: FileId) -> FileObject:
    """Look at a file."""
    return await service.retrieve_file(owner, file_id)


@router.delete("/{file_id}")
async def delete_file(service: Service, owner: Owner, file_id: FileId) -> FileDeleted:
    """Delete a file."""
    return await service.delete_file(owner, file_id)


@router.get(
    "/{file_id}/content",
    response_class=Response,
    responses={200: _BYTES, 206: _BYTES, 416: {"model": ErrorResponse}},
)
async def file_content(
    service: Service,
    owner: Owner,
    file_id: FileId,
    range_header: Annotated[str | None, Header(alias="range")] = None,
) -> Response:
    """Read a file; that of a running batch holds the records written so far."""
    file = await service.retrieve_file(owner, file_id)
    span = _byte_range(range_header, file.bytes) if range_header else None
    start, end = span or (0, file.bytes)
    headers = {
        "accept-ranges": "bytes",
        "content-length": str(end - start),
        # Whatever a user has uploaded, a browser must not show it as a page of ours.
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
        "x-content-type-options": "nosniff",
    }
    if span:
        if start >= file.bytes:
            raise RangeError(start, file.bytes)
        headers["content-range"] = f"bytes {start}-{end - 1}/{file.bytes}"
    with ExitStack() as place:
        place.enter_context(service.downloads.one(owner))
        return DownloadResponse(
            service.files.read(file_id, start, end),
            place=place.pop_all(),
            limits=service.context.limits,
            status_code=206 if span else 200,
            headers=headers,
            media_type="application/octet-stream",
        )


def _byte_range(header: str, size_bytes: int) -> tuple[int, int] | None:
    """Return the bytes [start, end) that a ``Range`` header asks for of ``size_bytes``.

    None for anything but one range, which RFC 9110 (14.2) lets a server ignore.
    ``start`` may be beyond the end.
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None or match[1] is match[2] is None:
        return None
    if match[1] is None:
        return max(0, size_bytes - int(match[2])), size_bytes
    start, end = int(match[1]), size_bytes
    if match[2] is not None:
        if int(match[2]) < start:
            return None
        end = min(int(match[2]) + 1, size_bytes)
    return start, end
