"""Replays recorded calls on another scheduler, and reports decisions and plans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final, assert_never

from sglang_coserve.core.request import RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.snapshot import EngineSnapshot
from sglang_coserve.core.step import StepPlan
from sglang_coserve.metrics import percentile
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

__all__ = ["PlanTally", "ReplayReport", "ReplayedPlan", "plan_text", "replay"]

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
    recorded state, also under another policy. Such a policy may query the prefix cache
    for a request that the recorded one did not query at that point; it gets the last recorded
    answer, or 0 if there is none.
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


_DECODES = (RequestState.DECODING, RequestState.PAUSED)


@dataclass(slots=True)
class PlanTally:
    """Sums over plans. A request counts once in every plan that it is part of."""

    decodes: int = 0
    paused_decodes: int = 0
    """Decodes that skip the step, paused by this plan or an earlier one."""

    parked_prefills: int = 0
    """Unfinished prefills without a chunk, parked by this plan or an earlier one."""

    online_prefill_tokens: int = 0
    offline_prefill_tokens: int = 0
    retracted_requests: int = 0
    retracted_tokens: int = 0
    shed_requests: int = 0

    def add(self, snapshot: EngineSnapshot, plan: StepPlan) -> None:
        """Count one plan. O(requests)."""
        retracted = {retraction.rid for retraction in plan.retract}
        chunks = {chunk.rid for chunk in plan.prefills}
        online = {
            request.info.rid
            for request in (*snapshot.admitted, *snapshot.waiting)
            if request.info.is_online
        }
        kept = [request for request in snapshot.admitted if request.info.rid not in retracted]
        num_decodes = sum(request.state in _DECODES for request in kept)
        self.decodes += plan.batch.decode_requests
        if not plan.skips_decodes:
            self.paused_decodes += num_decodes - plan.batch.decode_requests
        self.parked_prefills += sum(
            request.state not in _DECODES and request.info.rid not in chunks for request in kept
        )
        for rid, tokens in plan.prefills:
            if rid in online:
                self.online_prefill_tokens += tokens
            else:
                self.offline_prefill_tokens += tokens
        self.retracted_requests += len(plan.retract)
        self.retracted_tokens += sum(retraction.tokens for retraction in plan.retract)
        self.shed_requests += len(plan.shed)


class ReplayReport:
    """Collects the plans of one replay."""

    def __init__(self) -> None:
        self.recorded = PlanTally()
        self.replayed = PlanTally()
        self.num_plans = 0
        self.num_different = 0
        self._planning_us: list[float] = []

    def add(self, plan: ReplayedPlan, planning_s: float) -> None:
        """Add a replayed plan and the seconds that planning it took. O(requests)."""
        self.num_plans += 1
        self.num_different += bool(plan.differences)
        self.recorded.add(plan.snapshot, plan.recorded)
        self.replayed.add(plan.snapshot, plan.replayed)
        self._planning_us.append(planning_s * 1e6)

    def summary(self) -> str:
        """Return one line: how many plans differ, and how long planning took."""
        counts = f"{self.num_plans:,} plans, {self.num_different:,} differ"
        if not self._planning_us:
            return counts
        median_us, p99_us = (percentile(self._planning_us, q) for q in (50, 99))
        return f"{counts}; planning took {median_us:.0f} µs (median), {p99_us:.0f} µs (P99)"

    def table(self, recorded_policy: str, replayed_policy: str) -> str:
        """Return the two tallies side by side."""
        lines = [f"{'':24}{recorded_policy:>16}{replayed_policy:>16}"]
        for field in fields(PlanTally):
            recorded, replayed = (getattr(t, field.name) for t in (self.recorded, self.replayed))
            lines.append(f"{field.name.replace('_', ' '):24}{recorded:>16,}{replayed:>16,}")
        return "\n".join(lines)


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
