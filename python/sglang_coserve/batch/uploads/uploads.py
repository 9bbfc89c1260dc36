"""Uploads in parts (``/v1/uploads``), which are put together when all of them are there.

What an upload is to become, and each of its parts, is a file that no list shows: so quotas, expiry
and crashes are those of files. They are deleted once the upload is complete or cancelled.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import md5
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, Field

from sglang_coserve.batch.context import JobContext, new_id
from sglang_coserve.batch.errors import NotFoundError, TooLargeError
from sglang_coserve.batch.file_store import FileStore, once
from sglang_coserve.batch.record import FileRecord
from sglang_coserve.batch.schemas import ExpiresAfter, FileObject, RequestBody, ignored_fields
from sglang_coserve.batch.store import file_rows
from sglang_coserve.web.errors import ApiError

_log = logging.getLogger(__name__)

_LIFETIME_S: Final = 3600.0
"""As OpenAI's: what is not complete by then is deleted."""


class CreateUpload(RequestBody):
    """What a file is to become that comes in parts."""

    filename: Annotated[str, Field(min_length=1, max_length=255)]
    purpose: Literal["batch"]
    bytes: Annotated[int, Field(ge=0)]
    mime_type: str | None = None
    """Has no effect."""

    expires_after: ExpiresAfter | None = None


class CompleteUpload(RequestBody):
    """The parts in their order, and a sum over all of them."""

    part_ids: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=10_000)]
    md5: Annotated[str | None, Field(max_length=64)] = None


class UploadObject(BaseModel):
    """An upload, as it is after a call."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch"]
    status: Literal["pending", "completed", "cancelled"]
    file: FileObject | None = None

    @classmethod
    def of(
        cls,
        upload: FileRecord,
        wanted: CreateUpload,
        status: Literal["pending", "completed", "cancelled"],
        file: FileObject | None = None,
    ) -> Self:
        """Return an upload as the API shows it."""
        assert upload.expires_at_s is not None
        return cls(
            id=upload.id,
            bytes=wanted.bytes,
            created_at=int(upload.created_at_s),
            expires_at=int(upload.expires_at_s),
            filename=wanted.filename,
            purpose=wanted.purpose,
            status=status,
            file=file,
        )


class UploadPart(BaseModel):
    """A part that is there."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


@dataclass(frozen=True, slots=True)
class Uploads:
    """The uploads of all owners. Raises as ``BatchService``."""

    context: JobContext
    files: FileStore

    async def create(self, owner: str, request: CreateUpload) -> UploadObject:
        """Begin an upload.

        Raises:
            TooLargeError: it is to be larger than a file may be.
        """
        limit_bytes = self.context.limits.max_upload_bytes
        if request.bytes > limit_bytes:
            message = f"the file is larger than {limit_bytes:,} bytes: split it"
            raise TooLargeError(message, code="file_too_large", param="bytes")
        upload = await self.files.add(
            owner,
            new_id("upload_", self.context.rng),
            file_rows.UPLOAD,
            "",
            once(request.model_dump_json().encode()),
            lambda now_s: now_s + _LIFETIME_S,
        )
        if warning := ignored_fields(request.ignored):
            _log.warning("upload %s: %r", upload.id, warning)
        return UploadObject.of(upload, request, "pending")

    async def add_part(
        self, owner: str, upload_id: str, chunks: AsyncIterable[bytes]
    ) -> UploadPart:
        """Add a part, in any order; it is there when this returns.

        Raises:
            NotFoundError: there is no such upload, or it is complete, cancelled or expired.
            TooLargeError: the part is larger than a file may be.
        """
        upload, _ = await self._find(owner, upload_id)
        part = await self.files.add(
            owner,
            new_id("part_", self.context.rng),
            _part_of(upload_id),
            "",
            chunks,
            lambda _: upload.expires_at_s,
        )
        return UploadPart(id=part.id, created_at=int(part.created_at_s), upload_id=upload_id)

    async def complete(self, owner: str, upload_id: str, request: CompleteUpload) -> UploadObject:
        """Make a file of the parts.

        Raises:
            NotFoundError: there is no such upload or part, or it was completed or cancelled
                meanwhile.
            ApiError: size or sum is not what was said; the parts stay.
        """
        upload, wanted = await self._find(owner, upload_id)
        parts = [
            await self._row(owner, part_id, _part_of(upload_id), "part")
            for part_id in request.part_ids
        ]
        size_bytes = sum(part.size_bytes for part in parts)
        if size_bytes != wanted.bytes:
            message = f"the parts have {size_bytes:,} bytes, and {wanted.bytes:,} were announced"
            raise ApiError(message, code="size_mismatch", param="part_ids")
        joined = self._joined(parts, request.md5)
        file = await self.files.add_input(
            owner, wanted.filename, joined, lambda: wanted.expires_after
        )
        try:
            await self._forget(owner, upload_id)
        except NotFoundError:  # Another call was faster: it alone has made a file.
            await self.files.remove(owner, file.id)
            raise
        if warning := ignored_fields(request.ignored):
            _log.warning("upload %s: %r", upload_id, warning)
        return UploadObject.of(upload, wanted, "completed", FileObject.of(file))

    async def cancel(self, owner: str, upload_id: str) -> UploadObject:
        """Delete what is there of an upload.

        Raises:
            NotFoundError: there is no such upload.
        """
        upload, wanted = await self._find(owner, upload_id)
        await self._forget(owner, upload_id)
        return UploadObject.of(upload, wanted, "cancelled")

    async def _joined(self, parts: list[FileRecord], expected: str | None) -> AsyncGenerator[bytes]:
        found = md5(usedforsecurity=False)
        for part in parts:
            async for piece in self.files.read(part.id, 0, part.size_bytes):
                if expected is not None:
                    await self.context.threads.run(found.update, piece)
                yield piece
        if expected is not None and found.hexdigest() != expected.lower():
            message = f"the parts have the MD5 sum {found.hexdigest()}: send them again"
            raise ApiError(message, code="md5_mismatch", param="md5")

    async def _find(self, owner: str, upload_id: str) -> tuple[FileRecord, CreateUpload]:
        upload = await self._row(owner, upload_id, file_rows.UPLOAD, "upload")
        content = b"".join(
            [piece async for piece in self.files.read(upload_id, 0, upload.size_bytes)]
        )
        return upload, CreateUpload.model_validate_json(content)

    async def _row(self, owner: str, row_id: str, purpose: str, what: str) -> FileRecord:
        now_s = self.context.clock.now_s()
        try:
            return await self.context.store.run(
                file_rows.find, owner, row_id, now_s, purpose=purpose
            )
        except NotFoundError:
            raise _gone(what, row_id) from None

    async def _forget(self, owner: str, upload_id: str) -> None:
        """Delete an upload and its parts.

        Raises:
            NotFoundError: somebody else has.
        """
        part_ids = await self.context.store.run(file_rows.with_purpose, owner, _part_of(upload_id))
        try:
            await self.files.remove(owner, upload_id)
        except NotFoundError:
            raise _gone("upload", upload_id) from None
        for part_id in part_ids:
            with suppress(NotFoundError):  # It has expired.
                await self.files.remove(owner, part_id)


def _part_of(upload_id: str) -> str:
    """Return the purpose of a part of an upload."""
    return f"{file_rows.UPLOAD}/{upload_id}"


def _gone(what: str, row_id: str) -> NotFoundError:
    message = f"no such {what}, or it is complete, cancelled or expired: {row_id[:64]!r}"
    return NotFoundError(message, code=f"{what}_not_found", param=f"{what}_id")
