"""The objects of OpenAI's files and batches API, field by field, with our ``coserve`` part, and how
they are made of the store's records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

from sglang_coserve.batch.eta import Eta
from sglang_coserve.batch.record import FileRecord, JobRecord, Status
from sglang_coserve.jsonl.check_file import LineFault


class _Page(BaseModel):
    """Some of a list."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, found: Sequence[Any], limit: int, shown: Callable[[Any], Any]) -> Self:
        """Return the first ``limit`` of what was ``found``, which is one more when there is more.

        ``shown`` makes an object of each.
        """
        data = [*map(shown, found[:limit])]
        return cls(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=len(found) > limit,
        )


_MOST_NAMES: Final = 5
_NAME_CHARS: Final = 64
"""Most names of unknown fields in a warning, and their longest."""


def ignored_fields(names: Collection[str]) -> str | None:
    """Return a warning that fields with these ``names`` have no effect; None without any."""
    if not names:
        return None
    listed = ", ".join(name[:_NAME_CHARS] for name in sorted(names)[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"fields that this server does not know are ignored: {listed}{more}"


class RequestBody(BaseModel):
    """An object that clients send, or a part of one. Fields without a name here are ignored, since
    OpenAI may add some."""

    _unknown: frozenset[str] = frozenset()

    @model_validator(mode="wrap")
    @classmethod
    def _note_unknown(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        body = handler(data)
        if isinstance(data, dict):
            body._unknown = frozenset(data.keys() - cls.model_fields.keys())
        return body

    @property
    def ignored(self) -> set[str]:
        """The names of fields that have no effect: ``field``, or ``field.field`` of a part."""
        parts = {name: value for name, value in self if isinstance(value, RequestBody)}
        return {*self._unknown, *(f"{a}.{b}" for a, part in parts.items() for b in part.ignored)}


class ExpiresAfter(RequestBody):
    """When a file is deleted, counted from its creation."""

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

    @classmethod
    def of(cls, file: FileRecord) -> Self:
        """Return a file as the API shows it."""
        return cls(
            id=file.id,
            bytes=file.size_bytes,
            created_at=int(file.created_at_s),
            expires_at=_seconds(file.expires_at_s),
            filename=file.filename,
            purpose="batch" if file.purpose == "batch" else "batch_output",
        )


class FileList(_Page):
    """One page of files."""

    data: list[FileObject]


class FileDeleted(BaseModel):
    """The answer to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class CoserveOptions(BaseModel):
    """What OpenAI's API has no field for; the ``coserve`` field of a request to create a batch."""

    model_config = ConfigDict(extra="forbid", strict=True)

    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Among the batches of an owner, a higher priority is served first; among equals the batch
    whose window closes first."""


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class CreateBatch(RequestBody):
    """The body of a request to create a batch."""

    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Annotated[str, Field(max_length=64)]
    completion_window: Annotated[str, Field(max_length=64)]
    """A duration: ``24h``, ``90m``, ``1h30m``, ``7d``."""

    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None
    coserve: CoserveOptions = CoserveOptions()


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


WaitingFor = Literal[
    "check", "slot", "suspect", "model", "engine", "disk", "paused", "quota", "error"
]
"""Reasons why a batch stands still; see docs/batch_api.md."""


class CoserveBatch(BaseModel):
    """What OpenAI's batch object has no field for."""

    owner: str
    """The owner: the hash of the key that made the batch, or ``everybody``."""

    paused: bool
    priority: int
    """Among the batches of its owner."""

    eta: int | None
    """When the batch will be complete; None when that is not known."""

    rate_tokens_per_s: float | None
    """The batch's share of the measured offline throughput, on average until ``eta``."""

    online_delay_s: float | None
    """By how many seconds it has delayed online requests, those of all users together; None while
    that is not known."""

    waiting_for: WaitingFor | None
    """What its next lines wait for; None while lines run, and when none are left to run."""

    lines_in_flight: int
    """Lines that the engine has."""

    last_record_at: int | None
    """When the latest result was written; None before there is one."""

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

    @classmethod
    def of(
        cls,
        batch: JobRecord,
        eta: Eta | None = None,
        model: str | None = None,
        *,
        stalled_by: str | None = None,
        waiting_for: WaitingFor | None = None,
        lines_in_flight: int = 0,
    ) -> Self:
        """Return a batch as the API shows it; ``model`` is what is loaded now, None if unknown.

        The rest is known of an unfinished batch by its driver.
        """
        progress, usage = batch.progress, batch.progress.usage
        warnings = (stalled_by or _lateness(batch, eta), mixed_models(batch, model))
        return cls(
            id=batch.id,
            endpoint=batch.endpoint,
            model=batch.model_name,
            errors=BatchErrors(data=list(batch.faults)) if batch.faults else None,
            input_file_id=batch.input_file_id,
            completion_window=batch.completion_window,
            status=batch.status,
            output_file_id=batch.output_file_id if progress.output_bytes else None,
            error_file_id=batch.error_file_id if progress.error_bytes else None,
            created_at=int(batch.created_at_s),
            in_progress_at=_seconds(batch.in_progress_at_s),
            expires_at=int(batch.expires_at_s),
            finalizing_at=_seconds(batch.finalizing_at_s),
            completed_at=_seconds(batch.completed_at_s),
            failed_at=_seconds(batch.failed_at_s),
            expired_at=_seconds(batch.expired_at_s),
            cancelling_at=_seconds(batch.cancelling_at_s),
            cancelled_at=_seconds(batch.cancelled_at_s),
            request_counts=RequestCounts(
                total=batch.total_lines, completed=progress.completed, failed=progress.failed
            ),
            usage=BatchUsage(
                input_tokens=usage.input_tokens,
                input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
                output_tokens=usage.output_tokens,
                output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
                total_tokens=usage.total_tokens,
            ),
            metadata=None if batch.metadata is None else dict(batch.metadata),
            coserve=CoserveBatch(
                owner=batch.owner,
                paused=batch.is_paused,
                priority=batch.priority,
                eta=int(eta.at_s) if eta else None,
                rate_tokens_per_s=eta.rate_tokens_per_s if eta else None,
                online_delay_s=_delay_s(batch.online_delay_s),
                waiting_for=waiting_for,
                lines_in_flight=lines_in_flight,
                last_record_at=_seconds(batch.last_record_at_s),
                warning="; ".join(filter(None, warnings)) or None,
            ),
        )


class BatchList(_Page):
    """One page of batches."""

    data: list[BatchObject]


def mixed_models(batch: JobRecord, model: str | None) -> str | None:
    """Say that not all results of a batch are of one model; None if they are.

    ``model`` is what is loaded now, None if unknown.
    """
    completed, earlier = batch.progress.completed, batch.earlier_model_lines
    if not batch.status.is_final and model is not None and batch.model not in (None, model):
        earlier = completed
    if not earlier:
        return None
    return (
        f"results of more than one model: it has changed since {earlier} of the lines were"
        " answered (other weights, tokenizer, precision or parallelism); half-done lines start over"
    )


def _lateness(batch: JobRecord, eta: Eta | None) -> str | None:
    if eta is None or eta.at_s <= batch.expires_at_s:
        return None
    at = datetime.fromtimestamp(eta.at_s, UTC).isoformat(timespec="seconds")
    return (
        f"expected to be complete at {at}, {eta.at_s - batch.expires_at_s:.0f} s after"
        f" the window of {batch.completion_window} closes: lines that are not finished then will"
        " expire"
    )


def _delay_s(seconds: float | None) -> float | None:
    # The baseline errs to both sides; nobody is served sooner because of a batch.
    return None if seconds is None else max(0.0, round(seconds, 3))


def _seconds(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s)
