"""The life of a batch: a pure function from a record and an event to the next record.

::

    validating ──> in_progress ──> finalizing ──> completed
        │                │              └───────> expired
        └────────────────┴─> cancelling ────────> cancelled

A bad input, and a disk that fails for good, lead from any of these to ``failed``.
``pause`` and ``resume`` leave the status alone, because OpenAI's clients know no other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from sglang_coserve.batch.errors import ConflictError
from sglang_coserve.batch.record import JobRecord, Status
from sglang_coserve.jsonl.check_file import LineFault
from sglang_coserve.lines.result_record import Progress


@dataclass(frozen=True, slots=True)
class Validated:
    """The input can be used."""

    total_lines: int
    estimated_tokens: int
    model_name: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The input cannot be used, or the disk keeps the batch from its end."""

    faults: tuple[LineFault, ...]

    progress: Progress | None = None
    """Contents of the files at the end; None where the committed ones stand."""


@dataclass(frozen=True, slots=True)
class Progressed:
    """More records are on the disk. The values are totals, so saying it twice changes nothing."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class ServedBy:
    """The next result is of ``model``; ``completed`` lines have one already."""

    model: str
    completed: int


@dataclass(frozen=True, slots=True)
class LinesFinished:
    """Every line has its record."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The window has closed with lines unfinished."""


@dataclass(frozen=True, slots=True)
class Finalized:
    """Nothing of the batch is in the engine any more, and its files are complete."""


BatchAction = Literal["cancel", "pause", "resume"]


@dataclass(frozen=True, slots=True)
class Asked:
    """The owner wants no more of it, wants it to wait, or to go on."""

    action: BatchAction


Event: TypeAlias = (
    Validated | Failed | Progressed | ServedBy | LinesFinished | DeadlinePassed | Finalized | Asked
)

_S = Status
_PENDING = frozenset({_S.VALIDATING, _S.IN_PROGRESS})

_LEGAL_FROM: Final = MappingProxyType(
    {
        Validated: frozenset({_S.VALIDATING}),
        Failed: _PENDING | {_S.FINALIZING, _S.CANCELLING},
        Progressed: frozenset({_S.IN_PROGRESS, _S.FINALIZING, _S.CANCELLING}),
        ServedBy: frozenset({_S.IN_PROGRESS, _S.FINALIZING, _S.CANCELLING}),
        LinesFinished: frozenset({_S.IN_PROGRESS}),
        DeadlinePassed: frozenset({_S.IN_PROGRESS}),
        Finalized: frozenset({_S.FINALIZING, _S.CANCELLING}),
        Asked: _PENDING,
    }
)
"""The states in which each event may happen."""


def transition(record: JobRecord, event: Event, now_s: float) -> JobRecord:
    """Return ``record`` after ``event``; the record itself when nothing changes.

    Raises:
        ConflictError: a user asks for what the state forbids. Any other illegal
            event is a bug of the caller, hence an ``AssertionError``.
    """
    if event == Asked("cancel") and record.status is _S.CANCELLING:
        return record
    if record.status not in _LEGAL_FROM[type(event)]:
        assert isinstance(event, Asked), f"{type(event).__name__} while {record.status}"
        raise ConflictError(
            f"cannot {event.action} batch {record.id}: it is {record.status}",
            code="invalid_batch_status",
        )
    match event:
        case Validated(total_lines, estimated_tokens, model_name):
            return replace(
                record,
                status=_S.IN_PROGRESS,
                in_progress_at_s=now_s,
                total_lines=total_lines,
                estimated_tokens=estimated_tokens,
                model_name=model_name,
            )
        case Failed(faults, progress):
            return replace(
                record,
                status=_S.FAILED,
                failed_at_s=now_s,
                faults=faults,
                progress=progress or record.progress,
            )
        case Progressed(progress):
            assert record.progress.lines <= progress.lines <= record.total_lines
            has_more = progress.lines > record.progress.lines
            at_s = now_s if has_more else record.last_record_at_s
            return replace(record, progress=progress, last_record_at_s=at_s)
        case ServedBy(model, completed):
            is_change = record.model not in (None, model)
            earlier = completed if is_change else record.earlier_model_lines
            return replace(record, model=model, earlier_model_lines=earlier)
        case LinesFinished():
            assert record.progress.lines == record.total_lines
            return replace(record, status=_S.FINALIZING, finalizing_at_s=now_s)
        case DeadlinePassed():
            return replace(
                record, status=_S.FINALIZING, finalizing_at_s=now_s, is_past_deadline=True
            )
        case Finalized():
            return _finalized(record, now_s)
        case Asked("cancel"):
            return replace(record, status=_S.CANCELLING, cancelling_at_s=now_s)
        case Asked("pause"):
            return replace(record, is_paused=True)
        case Asked():
            return replace(record, is_paused=False)


def _finalized(record: JobRecord, now_s: float) -> JobRecord:
    if record.status is _S.CANCELLING:
        return replace(record, status=_S.CANCELLED, cancelled_at_s=now_s)
    assert record.progress.lines == record.total_lines, "finalized with lines unfinished"
    if record.is_past_deadline:
        return replace(record, status=_S.EXPIRED, expired_at_s=now_s)
    return replace(record, status=_S.COMPLETED, completed_at_s=now_s)
