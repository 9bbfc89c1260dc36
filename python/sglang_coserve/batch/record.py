"""Files, batches and events as the store keeps them, and what they sum up to: immutable values.

The store keeps the fields of a record as JSON. A new field needs a default: its value in records
that earlier versions wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from sglang_coserve.jsonl.check_file import LineFault
from sglang_coserve.lines.result_record import Progress


class Status(StrEnum):
    """The state of a batch; the values are OpenAI's."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """True if the state is final."""
        return self not in UNFINISHED


UNFINISHED: Final = (
    *(Status.VALIDATING, Status.IN_PROGRESS),
    *(Status.FINALIZING, Status.CANCELLING),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A stored file."""

    id: str
    owner: str
    filename: str
    purpose: str
    size_bytes: int
    created_at_s: float
    expires_at_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A batch. All times are in seconds since the epoch."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str

    output_file_id: str
    """Reserved at creation; the file is there once a line has succeeded."""

    error_file_id: str
    """Reserved at creation; the file is there once a line has failed."""

    completion_window: str
    metadata: Mapping[str, str] | None = None
    output_expires_after_s: float | None = None
    priority: int = 0
    idempotency_key: str | None = None
    fingerprint: str
    """Of the request, to tell a repeated one from another with the same key."""

    status: Status = Status.VALIDATING
    is_paused: bool = False
    is_past_deadline: bool = False
    """What is being finalized will be expired, not completed."""

    created_at_s: float
    expires_at_s: float
    in_progress_at_s: float | None = None
    finalizing_at_s: float | None = None
    completed_at_s: float | None = None
    failed_at_s: float | None = None
    expired_at_s: float | None = None
    cancelling_at_s: float | None = None
    cancelled_at_s: float | None = None

    model_name: str | None = None
    """What clients call the model of its first line; None before the input has been validated."""

    total_lines: int = 0
    """Requests in the input; 0 before it has been validated."""

    estimated_tokens: int = 0
    """What all lines together are expected to take; before the input has been validated, by
    its beginning."""

    online_delay_s: float | None = None
    """By how much it has delayed online requests, those of all users together; None while that is
    not known."""

    progress: Progress = field(default_factory=Progress)
    last_record_at_s: float | None = None
    """When the latest record of a line was counted; None before there is one."""

    faults: tuple[LineFault, ...] = ()

    model: str | None = None
    """What made the latest result; None before there is one."""

    earlier_model_lines: int = 0
    """Completed lines when that was last another model than before; 0 when it never was."""

    response: Mapping[str, Any] | None = None
    """Of a background response, which is a batch of one line that no list shows: what its object
    repeats of the request. None for a batch."""

    @property
    def will_be_served(self) -> bool:
        """True while the engine's rate is, or soon will be, shared with this batch."""
        return self.status in (Status.VALIDATING, Status.IN_PROGRESS) and not self.is_paused


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEvent:
    """A batch has reached a final state, which its owner's webhook is sent."""

    id: str
    type: str
    """``batch.completed``, ``batch.failed``, ``batch.expired`` or ``batch.cancelled``."""

    batch_id: str
    created_at_s: float
    due_at_s: float
    """When it is to be delivered next."""

    attempts: int = 0
    """Deliveries that have failed."""


_EXPORTED: Final = (*UNFINISHED, "paused")
"""Of ``batches``, for Prometheus: there a state that no batch has is named, too."""

BATCH_METRICS: Final = {
    "batches{state}": f"Unfinished batches: {', '.join(_EXPORTED)}; 0 while the engine drains.",
    "batch_lines_waiting": "Lines of batches that are not in the engine yet.",
    "batch_required_tokens_per_second": (
        "What unfinished batches need to be complete within their windows."
    ),
}
"""Metrics for Prometheus, with their labels, without ``coserve_``."""


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


def batch_values(status: ServiceStatus | None, required_tokens_per_s: float) -> dict[str, Any]:
    """Return the values of ``BATCH_METRICS``, by label where they have one; None: no batches."""
    states: dict[str, int] = {}
    if status is not None:
        states = {**status.batches, "paused": status.paused_batches}
    return {
        "batches": {str(state): states.get(state, 0) for state in _EXPORTED},
        "batch_lines_waiting": 0 if status is None else status.lines_waiting,
        "batch_required_tokens_per_second": required_tokens_per_s,
    }
