"""The objects of OpenAI's files and batches API, field by field, and our ``coserve`` part."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from sglang_coserve.batch.record import Status
from sglang_coserve.jsonl.check_file import LineFault


class ExpiresAfter(BaseModel):
    """When a file is deleted, counted from its creation."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class FileObject(BaseModel):
    """A stored file: an input, or the output or errors of a batch."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileList(BaseModel):
    """One page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    """The answer to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class CreateUpload(BaseModel):
    """What a file is to become that comes in parts."""

    filename: Annotated[str, Field(min_length=1, max_length=255)]
    purpose: Literal["batch"]
    bytes: Annotated[int, Field(ge=0)]
    mime_type: Annotated[str, Field(max_length=255)]
    expires_after: ExpiresAfter | None = None


class CompleteUpload(BaseModel):
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


class UploadPart(BaseModel):
    """A part that is there."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


class CoserveOptions(BaseModel):
    """What OpenAI's API has no field for; the ``coserve`` field of a request to create a batch."""

    model_config = ConfigDict(extra="forbid", strict=True)

    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Batches of a higher priority are served first of those of their owner."""

    weight: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False, strict=False)] = 1.0
    """Share of the engine among their owner's batches of one priority."""

    best_effort: bool = False
    """True to begin also where the window cannot be kept: lines that are not finished when it
    closes expire."""


_MetadataKey = Annotated[str, Field(max_length=64)]
_MetadataValue = Annotated[str, Field(max_length=512)]


class CreateBatch(BaseModel):
    """The body of a request to create a batch."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Annotated[str, Field(max_length=64)]
    completion_window: Annotated[str, Field(max_length=64)]
    """A duration: ``24h``, ``90m``, ``1h30m``, ``7d``."""

    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None
    coserve: CoserveOptions = CoserveOptions()


class CreateResponse(BaseModel):
    """The body of a request in the background; the engine looks at the other fields."""

    model_config = ConfigDict(extra="allow")

    background: Literal[True]
    stream: bool | None = None
    store: Literal[True] | None = None
    """It is stored, whatever else is asked."""

    model: Annotated[str, Field(max_length=256)] | None = None
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=16)] | None = None
    previous_response_id: str | None = None

    coserve_deadline_s: Annotated[float, Field(ge=1, le=30 * 86_400)] | None = None
    """When it is given up, counted from its creation; by default after a day."""


class ResponseDeleted(BaseModel):
    """The answer to the deletion of a response or chat."""

    id: str
    object: Literal["response", "chat.completion.deleted"]
    deleted: Literal[True] = True


class BatchErrors(BaseModel):
    """All that validation found."""

    object: Literal["list"] = "list"
    data: list[LineFault]


class RequestCounts(BaseModel):
    """Lines by what became of them; the rest is not finished."""

    total: int
    completed: int
    failed: int


class InputTokensDetails(BaseModel):
    """Prompt tokens that need no computing."""

    cached_tokens: int


class OutputTokensDetails(BaseModel):
    """Generated tokens that are no part of the answer."""

    reasoning_tokens: int


class BatchUsage(BaseModel):
    """Tokens of all the finished lines."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class CoserveBatch(BaseModel):
    """What OpenAI's batch object has no field for."""

    owner: str
    """Whose batch it is: the hash of the key that made it."""

    paused: bool
    priority: int
    """Among the batches of its owner, as ``weight``."""

    weight: float

    eta: int | None
    """P50 of when the batch will be complete; None when that is not known."""

    eta_p95: int | None
    """P95 of it: of 20 such batches 19 are complete by then."""

    rate_tokens_per_s: float | None
    """The batch's share of the measured offline throughput."""

    online_delay_s: float | None
    """By how many seconds it has delayed online requests, those of all users together; None while
    that is not known."""

    warning: str | None
    """Why the batch may miss its window, or makes no progress; that its results are of
    several models."""


class BatchObject(BaseModel):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    """What the first line asks for; None until the input was checked."""

    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    """Readable while the batch runs; None until a line has succeeded."""

    error_file_id: str | None
    """Readable while the batch runs; None until a line has failed."""

    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    coserve: CoserveBatch


class BatchList(BaseModel):
    """One page of batches."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
