"""Checks requests to create batches, and whether a batch can meet its window."""

from __future__ import annotations

import math
import re
from hashlib import sha256
from typing import Final

from sglang_coserve.batch.context import JobContext, new_id
from sglang_coserve.batch.errors import BatchRequestError
from sglang_coserve.batch.forecast import JobForecast
from sglang_coserve.batch.record import JobRecord
from sglang_coserve.batch.schemas import CreateBatch
from sglang_coserve.jsonl.request_line import endpoint_of

_UNITS_S: Final = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_PART = re.compile(r"([0-9]{1,9})([dhms])")
_WINDOW = re.compile(r"(?:[0-9]{1,9}[dhms])+")


def window_s(text: str, max_window_s: float) -> float:
    """Return the seconds in ``text``: ``24h``, ``90m``, ``1h30m``, ``7d``.

    Raises:
        BatchRequestError: it is no duration, or not in (0, ``max_window_s``].
    """
    if _WINDOW.fullmatch(text) is None:
        raise _error(f"completion_window {text[:32]!r} is no duration: use 24h, 90m, 1h30m or 7d")
    seconds = sum(int(count) * _UNITS_S[unit] for count, unit in _PART.findall(text))
    if not 0 < seconds <= max_window_s:
        raise _error(
            f"completion_window {text!r} must be more than 0 s and at most {max_window_s:g} s"
        )
    return float(seconds)


def window_text(seconds: float) -> str:
    """Return the shortest window of whole minutes, or of whole seconds below ten, that lasts
    so long."""
    whole_s = max(1, math.ceil(seconds))
    if whole_s >= 600:
        whole_s = math.ceil(whole_s / 60) * 60
    parts = []
    for unit, unit_s in _UNITS_S.items():
        count, whole_s = divmod(whole_s, unit_s)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def _error(message: str) -> BatchRequestError:
    return BatchRequestError(message, code="invalid_completion_window", param="completion_window")


def new_batch(
    owner: str, request: CreateBatch, idempotency_key: str | None, context: JobContext
) -> JobRecord:
    """Return the batch that ``request`` asks for, whose input is still to be looked up.

    Raises:
        BatchRequestError: the endpoint or the window cannot be used.
    """
    endpoints = context.backend.endpoints
    endpoint = endpoint_of(request.endpoint)
    if endpoint not in endpoints:
        message = f"endpoint must be one of {', '.join(sorted(endpoints))}"
        raise BatchRequestError(message, code="invalid_endpoint", param="endpoint")
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
        weight=request.coserve.weight,
        idempotency_key=idempotency_key,
        fingerprint=sha256(request.model_dump_json().encode()).hexdigest(),
        created_at_s=now_s,
        expires_at_s=now_s + window_s(request.completion_window, context.limits.max_window_s),
    )


def raise_if_window_too_short(batch: JobRecord, forecast: JobForecast) -> None:
    """Refuse a batch that would miss its window even if it were served first, and took as little
    longer than forecast as any of the last ones.

    Raises:
        BatchRequestError: it would; the message names the window that could be kept.
    """
    asked_s = batch.expires_at_s - batch.created_at_s
    if forecast.first_s is None or forecast.first_s <= asked_s:
        return
    assert forecast.eta_s is not None and forecast.eta_p95_s is not None
    p50_s, p95_s = (
        forecast.eta_s - batch.created_at_s,
        forecast.eta_p95_s - batch.created_at_s,
    )
    message = (
        f"a completion_window of {batch.completion_window} cannot be kept: about"
        f" {batch.estimated_tokens:,} tokens take {window_text(p50_s)} (P50), and"
        f" {window_text(forecast.first_s)} at the best, beside the batches and the online"
        f" requests there are; ask for {window_text(p95_s)} (P95) or more, split the file, or set"
        " coserve.best_effort to have what can be finished"
    )
    raise BatchRequestError(message, code="window_too_short", param="completion_window")
