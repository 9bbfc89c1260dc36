"""The load of the Batch API, in a few numbers for an operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from sglang_coserve.batch.record import JobRecord, Status
from sglang_coserve.lines.fair_slots import FairSlots

__all__ = ["EXPORTED_STATES", "ServiceStatus", "service_status"]


EXPORTED_STATES: Final = ("validating", "in_progress", "finalizing", "cancelling")
"""Of ``batches``, for Prometheus: there a state that no batch has is named, too."""


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
    """Ends of batches that no receiver has accepted yet."""

    model: str
    """The model that answers lines; unfinished ones continue after a restart if it is the same."""


def service_status(
    unfinished: Iterable[JobRecord],
    slots: FairSlots,
    suspects_in_flight: int,
    model: str,
    line_retries: int,
    webhooks_pending: int,
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
        model=model,
    )
