"""How busy the Batch API is, in a few numbers for an operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sglang_coserve.batch.record import JobRecord, Status
from sglang_coserve.lines.fair_slots import FairSlots

__all__ = ["ServiceStatus", "service_status"]


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """A moment in the life of the service."""

    batches: Mapping[str, int]
    """Unfinished batches by status; a status that none has is not named."""

    paused_batches: int
    """Of them, those that wait to be resumed."""

    lines_in_flight: int
    """Lines that the engine has."""

    bytes_in_flight: int
    """Of the input, for these lines."""

    lines_waiting: int
    """Lines of batches in progress that the engine has yet to get, paused ones too. One that
    has just ended is among them until its record is on the disk."""

    line_retries: int
    """Since the start."""

    webhooks_pending: int
    """Ends of batches that no receiver has taken yet."""

    required_tokens_per_s: float
    """What offline work must get for every batch that is served to be complete in its window."""

    model: str
    """What lines are answered by; half-done ones go on after a restart if it is the same."""


def service_status(
    unfinished: Iterable[JobRecord],
    slots: FairSlots,
    suspects_in_flight: int,
    model: str,
    line_retries: int,
    webhooks_pending: int,
    now_s: float,
) -> ServiceStatus:
    """Return the status of a service whose batches in no final state are ``unfinished``."""
    records = list(unfinished)
    lines_left = sum(
        record.total_lines - record.progress.lines
        for record in records
        if record.status is Status.IN_PROGRESS
    )
    return ServiceStatus(
        batches=dict(Counter(record.status.value for record in records)),
        paused_batches=sum(record.is_paused for record in records),
        lines_in_flight=slots.lines_in_flight + suspects_in_flight,
        bytes_in_flight=slots.bytes_in_flight,
        lines_waiting=max(0, lines_left - slots.lines_in_flight),
        line_retries=line_retries,
        webhooks_pending=webhooks_pending,
        required_tokens_per_s=sum(
            _required_per_s(record, now_s) for record in records if record.will_be_served
        ),
        model=model,
    )


def _required_per_s(record: JobRecord, now_s: float) -> float:
    left_tokens = max(0, record.estimated_tokens - record.progress.estimated_tokens)
    # What is due at once, or was, is wanted within a second.
    return left_tokens / max(1.0, record.expires_at_s - now_s)
