"""Records the calls made to a scheduler, and makes them again on another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, assert_never

from msgspec import Struct

from sglang_coserve.core.advisory import Advisory
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.slo import Slo
from sglang_coserve.core.latency_model.profile import LatencyProfile
from sglang_coserve.core.offline_queue import QueuedRequest
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.request import Ending
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import EngineSnapshot, PrefixCache, RequestInfo
from sglang_coserve.core.step import PrefillChunk, StepPlan, StepResult


class _Call(Struct, frozen=True, forbid_unknown_fields=True, tag_field="event"):
    """A call, named by its tag where it is written as it is."""


class Arrived(_Call, frozen=True, tag="arrived"):
    """``Scheduler.arrived`` was called."""

    info: RequestInfo
    cached_tokens: int = 0


class OfflineAdded(_Call, frozen=True, tag="added"):
    """``Scheduler.add_offline`` was called."""

    request: QueuedRequest


class Cached(_Call, frozen=True, tag="cached"):
    """``Scheduler.cached`` was called."""

    rid: str
    cached_tokens: int


class NoRoom(_Call, frozen=True, tag="no_room"):
    """``Scheduler.no_room`` was called."""

    rid: str


class Planned(_Call, frozen=True, tag="planned"):
    """``Scheduler.plan`` was called, and returned ``plan``."""

    snapshot: EngineSnapshot
    cached_tokens: Mapping[str, int | None]
    """The answers of the prefix cache: cached tokens of each request queried, by rid."""

    plan: StepPlan


class Started(_Call, frozen=True, tag="started"):
    """``Scheduler.start`` was called with the last plan."""

    chunks: tuple[PrefillChunk, ...]


class Updated(_Call, frozen=True, tag="updated"):
    """``Scheduler.update`` was called."""

    result: StepResult


class Restored(_Call, frozen=True, tag="restored"):
    """``Scheduler.restore`` was called."""

    rid: str
    generated_tokens: int


class Finished(_Call, frozen=True, tag="finished"):
    """``Scheduler.finish`` was called."""

    rid: str
    ending: Ending = Ending.COMPLETE


Event: TypeAlias = (
    Arrived | OfflineAdded | Cached | NoRoom | Planned | Started | Updated | Restored | Finished
)


@dataclass(frozen=True, slots=True)
class SchedulerSetup:
    """The settings of a scheduler; equal setups make schedulers that behave alike."""

    policy: str
    """Name of the policy, which also determines the offline queue."""

    slos: tuple[Slo, ...]
    config: SchedulerConfig
    profile: LatencyProfile
    """The latency model that planning starts with."""

    engine: EngineSize = field(default_factory=EngineSize)
    """Limits of the engine, for the no-interference baseline."""

    def make(self, advisory: Advisory | None = None) -> Scheduler:
        """Return a new scheduler.

        ``advisory`` calls what judges and learns; see ``Scheduler``.

        Raises:
            ConfigError: no policy has this name.
        """
        report = self.profile.report
        return Scheduler(
            make_policy(self.policy, self.config),
            self.profile.latency_model,
            self.slos,
            self.config,
            engine=self.engine,
            profile_mape=None if report is None else report.mape,
            advisory=advisory,
        )


_P = ParamSpec("_P")


def _recorded(
    method: Callable[Concatenate[Any, _P], None], event: Callable[_P, Event]
) -> Callable[Concatenate[Any, _P], None]:
    """Return a method of ``Scheduler`` that records each call of it that has succeeded."""

    @wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        method(self, *args, **kwargs)
        self._sink(event(*args, **kwargs))

    return call


class RecordingScheduler(Scheduler):
    """A scheduler that passes every successful call to ``sink`` as an event.

    Snapshots and plans are passed on without copies, since they are immutable.
    """

    def __init__(self, scheduler: Scheduler, sink: Callable[[Event], None]) -> None:
        """Be ``scheduler``, which must be new, in all but what is recorded."""
        self.__dict__ = scheduler.__dict__
        self._sink = sink

    arrived = _recorded(Scheduler.arrived, Arrived)
    add_offline = _recorded(Scheduler.add_offline, OfflineAdded)
    cached = _recorded(Scheduler.cached, Cached)
    no_room = _recorded(Scheduler.no_room, NoRoom)
    update = _recorded(Scheduler.update, Updated)
    restore = _recorded(Scheduler.restore, Restored)
    finish = _recorded(Scheduler.finish, Finished)

    def plan(self, snapshot: EngineSnapshot, cache: PrefixCache) -> StepPlan:
        """See ``Scheduler.plan``."""
        answers = _NotedAnswers(cache)
        plan = StepPlan()
        try:
            plan = super().plan(snapshot, answers)
        finally:  # One that fails, too: it fails again when it is replayed.
            # A snapshot may look at those who wait when they are asked for; a record has them all.
            whole = replace(snapshot, waiting=list(snapshot.waiting))
            self._sink(Planned(whole, answers.noted, plan))
        return plan

    def start(self, plan: StepPlan, chunks: Sequence[PrefillChunk]) -> None:
        """See ``Scheduler.start``."""
        super().start(plan, chunks)
        self._sink(Started(tuple(chunks)))


class _NotedAnswers:
    """A ``PrefixCache`` that records its answers."""

    def __init__(self, cache: PrefixCache) -> None:
        self.noted: dict[str, int | None] = {}
        self._cache = cache

    def cached_tokens(self, rid: str) -> int | None:
        tokens = self.noted[rid] = self._cache.cached_tokens(rid)
        return tokens


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
