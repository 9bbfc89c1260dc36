"""Makes OpenAI's objects from the store's records."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from sglang_coserve.batch.forecast import JobForecast
from sglang_coserve.batch.record import FileRecord, JobRecord
from sglang_coserve.batch.schemas import (
    BatchErrors,
    BatchList,
    BatchObject,
    BatchUsage,
    CoserveBatch,
    FileList,
    FileObject,
    InputTokensDetails,
    OutputTokensDetails,
    RequestCounts,
)

_Page = TypeVar("_Page", FileList, BatchList)


def file_object(file: FileRecord) -> FileObject:
    """Return a file as the API shows it."""
    return FileObject(
        id=file.id,
        bytes=file.size_bytes,
        created_at=int(file.created_at_s),
        expires_at=_seconds(file.expires_at_s),
        filename=file.filename,
        purpose="batch" if file.purpose == "batch" else "batch_output",
    )


def page_of(kind: type[_Page], found: Sequence[Any], limit: int) -> _Page:
    """Return the first ``limit`` of what was ``found``, which is one more when there is more."""
    data = list(found[:limit])
    return kind(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(found) > limit,
    )


def batch_object(
    batch: JobRecord,
    forecast: JobForecast | None = None,
    stalled_by: str | None = None,
    model: str | None = None,
) -> BatchObject:
    """Return a batch as the API shows it; ``model`` is what is loaded now, None if unknown."""
    progress, usage = batch.progress, batch.progress.usage
    warnings = (stalled_by or _lateness(batch, forecast), mixed_models(batch, model))
    return BatchObject(
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
            weight=batch.weight,
            eta=_seconds(forecast.eta_s) if forecast else None,
            eta_p95=_seconds(forecast.eta_p95_s) if forecast else None,
            rate_tokens_per_s=forecast.rate_tokens_per_s if forecast else None,
            online_delay_s=_delay_s(batch.online_delay_s),
            warning="; ".join(filter(None, warnings)) or None,
        ),
    )


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


def _lateness(batch: JobRecord, forecast: JobForecast | None) -> str | None:
    if forecast is None or forecast.eta_s is None or not forecast.is_late:
        return None
    eta = datetime.fromtimestamp(forecast.eta_s, UTC).isoformat(timespec="seconds")
    return (
        f"expected to be complete at {eta}, {forecast.eta_s - batch.expires_at_s:.0f} s after"
        f" the window of {batch.completion_window} closes: lines that are not finished then will"
        " expire"
    )


def _delay_s(seconds: float | None) -> float | None:
    # The baseline errs to both sides; nobody is served sooner because of a batch.
    return None if seconds is None else max(0.0, round(seconds, 3))


def _seconds(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s)
