"""Checks requests to create batches."""

from __future__ import annotations

import math
from hashlib import sha256

from sglang_coserve.batch.context import JobContext, new_id
from sglang_coserve.batch.record import JobRecord
from sglang_coserve.batch.schemas import CreateBatch
from sglang_coserve.durations import UNITS_S, duration_s
from sglang_coserve.jsonl.request_line import endpoint_of
from sglang_coserve.web.errors import ApiError


def window_s(text: str, max_window_s: float) -> float:
    """Return the seconds in ``text``: ``24h``, ``90m``, ``1h30m``, ``7d``.

    Raises:
        ApiError: it is no duration, or not in (0, ``max_window_s``].
    """
    seconds = duration_s(text)
    if seconds is None:
        raise _error(f"completion_window {text[:32]!r} is no duration: use 24h, 90m, 1h30m or 7d")
    if not 0 < seconds <= max_window_s:
        raise _error(
            f"completion_window {text!r} must be more than 0 s and at most {max_window_s:g} s"
        )
    return seconds


def window_text(seconds: float) -> str:
    """Return the shortest window of whole minutes, or of whole seconds below ten, that lasts
    so long."""
    whole_s = max(1, math.ceil(seconds))
    if whole_s >= 600:
        whole_s = math.ceil(whole_s / 60) * 60
    parts = []
    for unit, unit_s in UNITS_S.items():
        count, whole_s = divmod(whole_s, unit_s)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def _error(message: str) -> ApiError:
    return ApiError(message, code="invalid_completion_window", param="completion_window")


def new_batch(
    owner: str, request: CreateBatch, idempotency_key: str | None, context: JobContext
) -> JobRecord:
    """Return the batch that ``request`` asks for, whose input is still to be looked up.

    Raises:
        ApiError: the endpoint or the window cannot be used.
    """
    endpoints = context.backend.endpoints
    endpoint = endpoint_of(request.endpoint)
    if endpoint not in endpoints:
        message = f"endpoint must be one of {', '.join(sorted(endpoints))}"
        raise ApiError(message, code="invalid_endpoint", param="endpoint")
    now_s, rng = context.clock.now_s(), context.rng
    expiry = request.output_expires_after
    return JobRecord(
        id=new_id("batch_", rng),
        owner=owner,
        endpoint=endpoint,
        input_file_id=request.input_file_id,
        output_file_id=new_id("file-", rng),
        error_file_id=new_id("file-", rng),
        completion_window=request.completion_window,
        metadata=request.metadata,
        output_expires_after_s=expiry.seconds if expiry else None,
        priority=request.coserve.priority,
        idempotency_key=idempotency_key,
        fingerprint=sha256(request.model_dump_json().encode()).hexdigest(),
        created_at_s=now_s,
        expires_at_s=now_s + window_s(request.completion_window, context.limits.max_window_s),
    )
