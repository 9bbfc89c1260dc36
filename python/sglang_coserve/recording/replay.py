"""Replays recorded calls on another scheduler, and compares the plans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final, assert_never

from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.snapshot import EngineSnapshot
from sglang_coserve.core.step import StepPlan
from sglang_coserve.recording.events import (
    Arrived,
    Cached,
    Event,
    Finished,
    NoRoom,
    OfflineAdded,
    Planned,
    Restored,
    Started,
    Updated,
)

_TIME_TOLERANCE: Final = 1e-9
"""Relative tolerance: refining a model may round differently on another machine."""


@dataclass(frozen=True, slots=True)
class ReplayedPlan:
    """A plan of a recording, and the plan of the replaying scheduler for the same snapshot."""

    index: int
    """Position among the plans of the recording, from 0."""

    snapshot: EngineSnapshot
    recorded: StepPlan
    replayed: StepPlan

    @property
    def differences(self) -> tuple[str, ...]:
        """Names of the fields in which the plans differ; times may differ by rounding."""
        if self.recorded == self.replayed:
            return ()
        names = (field.name for field in fields(StepPlan))
        return tuple(
            name
            for name in names
            if not _is_same(getattr(self.recorded, name), getattr(self.replayed, name))
        )


def replay(events: Iterable[Event], scheduler: Scheduler) -> Iterator[ReplayedPlan]:
    """Make the recorded calls on a new ``scheduler``; yield each recorded plan with its own.

    Whatever it plans, the next calls are those of the recording, so each plan starts from the
    recorded state. A plan that differs may query the prefix cache for a request that the recorded
    one did not query at that point; it gets the last recorded answer, or 0 if there is none.
    """
    cache = _RecordedAnswers()
    index = 0
    recorded = StepPlan()
    for event in events:
        match event:
            case Arrived(info, cached_tokens):
                scheduler.arrived(info, cached_tokens)
            case OfflineAdded(request):
                scheduler.add_offline(request)
            case Cached(rid, cached_tokens):
                scheduler.cached(rid, cached_tokens)
            case NoRoom(rid):
                scheduler.no_room(rid)
            case Planned(snapshot, answers, recorded):
                cache.known |= answers
                yield ReplayedPlan(index, snapshot, recorded, scheduler.plan(snapshot, cache))
                index += 1
            case Started(chunks):
                scheduler.start(recorded, chunks)
            case Updated(result):
                scheduler.update(result)
            case Restored(rid, generated_tokens):
                scheduler.restore(rid, generated_tokens)
            case Finished(rid, ending):
                scheduler.finish(rid, ending)
                cache.known.pop(rid, None)
            case _:
                assert_never(event)


class _RecordedAnswers:
    """A ``PrefixCache`` that returns the recorded answers."""

    def __init__(self) -> None:
        self.known: dict[str, int | None] = {}

    def cached_tokens(self, rid: str) -> int | None:
        return self.known.get(rid, 0)


def _is_same(recorded: object, replayed: object) -> bool:
    if isinstance(recorded, float) and isinstance(replayed, float):
        return math.isclose(recorded, replayed, rel_tol=_TIME_TOLERANCE)
    return recorded == replayed


def plan_text(plan: StepPlan) -> str:
    """Return a plan as one line of text."""
    return ", ".join(_parts(plan))


def _parts(plan: StepPlan) -> Iterator[str]:
    yield f"{plan.batch.decode_requests} decodes"
    for name in ("prefills", "pause", "resume", "park", "retract", "shed"):
        items: Sequence[str | tuple[str, int]] = getattr(plan, name)
        if items:
            texts = (item if isinstance(item, str) else f"{item[0]}:{item[1]}" for item in items)
            yield f"{name.removesuffix('s')} {' '.join(texts)}"
    yield f"{plan.predicted_s * 1e3:.2f} of {plan.budget_s * 1e3:.2f} ms"
