"""Records the steps of a scheduler, and makes their plans again on another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, assert_never

from msgspec import Struct

from sglang_coserve.core.advisory import Advisory
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.slo import Slo
from sglang_coserve.core.offline_queue import PackedTokens, QueuedRequest
from sglang_coserve.core.offline_queue.request import TOKEN_BYTES
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.request import Ending
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import EngineSnapshot, PrefixCache, RequestInfo
from sglang_coserve.core.step import PrefillChunk, StepPlan, StepResult
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.latency_profile import LatencyProfile


class _Call(Struct, frozen=True, forbid_unknown_fields=True, tag_field="call"):
    """A call of a scheduler, with its arguments."""


class Arrived(_Call, frozen=True, tag="arrived"):
    """``Scheduler.arrived`` was called."""

    info: RequestInfo
    token_ids: PackedTokens = PackedTokens(b"")


class OfflineAdded(_Call, frozen=True, tag="added"):
    """``Scheduler.add_offline`` was called."""

    request: QueuedRequest

    def __post_init__(self) -> None:
        """Check the length of the prompt.

        Raises:
            ValueError: the bytes are no whole number of tokens.
        """
        if (size_bytes := len(self.request.token_ids)) % TOKEN_BYTES:
            raise ValueError(f"token_ids: {size_bytes} bytes are no tokens")


class Cached(_Call, frozen=True, tag="cached"):
    """``Scheduler.cached`` was called."""

    rid: str
    cached_tokens: int


class NoRoom(_Call, frozen=True, tag="no_room"):
    """``Scheduler.no_room`` was called."""

    rid: str


class Flushed(_Call, frozen=True, tag="flushed"):
    """``Scheduler.flushed`` was called."""


class Started(_Call, frozen=True, tag="started"):
    """``Scheduler.start`` was called with the plan of the last step that has one."""

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
    token_ids: PackedTokens = PackedTokens(b"")
    output_tokens: int = 0


Call: TypeAlias = (
    Arrived | OfflineAdded | Cached | NoRoom | Flushed | Started | Updated | Restored | Finished
)


class Planned(Struct, frozen=True, forbid_unknown_fields=True):
    """The input and the output of ``Scheduler.plan``."""

    snapshot: EngineSnapshot
    cached_tokens: Mapping[str, int | None]
    """The answers of the prefix cache: cached tokens of each request queried, by rid."""

    plan: StepPlan
    """The plan returned; an empty plan if planning failed."""


class RecordedStep(Struct, frozen=True, forbid_unknown_fields=True):
    """The plan of a step, and the calls before it."""

    calls: tuple[Call, ...]
    """The successful calls since the step before, in order. The result of a step is the call
    ``Updated`` of a later one."""

    planned: Planned | None = None
    """None for a step that the engine ran without a plan: its result is the last call."""


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

    policy_settings: Mapping[str, int | float] = field(default_factory=dict)
    """Settings of the policy that have another value than their default."""

    def make(self, advisory: Advisory | None = None) -> Scheduler:
        """Return a new scheduler.

        ``advisory`` calls what judges and learns; see ``Scheduler``.

        Raises:
            ConfigError: no policy has this name, or the policy has no such setting.
        """
        report = self.profile.report
        return Scheduler(
            make_policy(self.policy, self.policy_settings),
            self.profile.latency_model,
            self.slos,
            self.config,
            engine=self.engine,
            profile_mape=None if report is None else report.mape,
            advisory=advisory,
        )


_P = ParamSpec("_P")


def _recorded(
    method: Callable[Concatenate[Any, _P], None], made: Callable[_P, Call]
) -> Callable[Concatenate[Any, _P], None]:
    """Return a method of ``Scheduler`` that notes each call of it that has succeeded."""

    @wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        method(self, *args, **kwargs)
        self._calls.append(made(*args, **kwargs))

    return call


class RecordingScheduler(Scheduler):
    """A scheduler that passes every step to ``write``.

    Snapshots, plans and results are passed on without copies, since they are immutable.
    """

    def __init__(self, scheduler: Scheduler, write: Callable[[RecordedStep], None]) -> None:
        """Be ``scheduler``, which must be new, in all but what is recorded."""
        self.__dict__ = scheduler.__dict__
        self._write = write
        self._calls: list[Call] = []

    arrived = _recorded(Scheduler.arrived, Arrived)
    add_offline = _recorded(Scheduler.add_offline, OfflineAdded)
    cached = _recorded(Scheduler.cached, Cached)
    no_room = _recorded(Scheduler.no_room, NoRoom)
    flushed = _recorded(Scheduler.flushed, Flushed)
    restore = _recorded(Scheduler.restore, Restored)
    finish = _recorded(Scheduler.finish, Finished)

    def plan(self, snapshot: EngineSnapshot, cache: PrefixCache) -> StepPlan:
        """See ``Scheduler.plan``. Ends the recorded step, also when planning fails."""
        answers = _NotedAnswers(cache)
        plan = StepPlan()
        try:
            plan = super().plan(snapshot, answers)
        finally:
            # A snapshot may list waiting requests on demand; a recording needs the whole list.
            whole = replace(snapshot, waiting=list(snapshot.waiting))
            self._end_step(Planned(whole, answers.noted, plan))
        return plan

    def start(self, plan: StepPlan, chunks: Sequence[PrefillChunk]) -> None:
        """See ``Scheduler.start``."""
        super().start(plan, chunks)
        self._calls.append(Started(tuple(chunks)))

    def update(self, result: StepResult) -> None:
        """See ``Scheduler.update``. A result without a plan ends a recorded step."""
        super().update(result)
        self._calls.append(Updated(result))
        if result.step is None:
            self._end_step()

    def _end_step(self, planned: Planned | None = None) -> None:
        step = RecordedStep(tuple(self._calls), planned)
        self._calls.clear()
        self._write(step)


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


def replay(steps: Iterable[RecordedStep], scheduler: Scheduler) -> Iterator[ReplayedPlan]:
    """Make the recorded calls and plans on a new ``scheduler``; yield each plan with its replay.

    The calls after a plan are the recorded ones, also if the plan differs: each plan starts from
    the recorded state. A plan that differs may query the prefix cache for a request that the
    recorded plan did not query; the answer is then the last recorded one, or 0 without any.
    """
    cache = _RecordedAnswers()
    index = 0
    recorded = StepPlan()
    for step in steps:
        for call in step.calls:
            match call:
                case Arrived(info, token_ids):
                    scheduler.arrived(info, token_ids)
                case OfflineAdded(request):
                    scheduler.add_offline(request)
                case Cached(rid, cached_tokens):
                    scheduler.cached(rid, cached_tokens)
                case NoRoom(rid):
                    scheduler.no_room(rid)
                case Flushed():
                    scheduler.flushed()
                case Started(chunks):
                    scheduler.start(recorded, chunks)
                case Updated(result):
                    scheduler.update(result)
                case Restored(rid, generated_tokens):
                    scheduler.restore(rid, generated_tokens)
                case Finished(rid, ending, token_ids, output_tokens):
                    scheduler.finish(rid, ending, token_ids=token_ids, output_tokens=output_tokens)
                    cache.known.pop(rid, None)
                case _:
                    assert_never(call)
        if step.planned is not None:
            snapshot, recorded = step.planned.snapshot, step.planned.plan
            cache.known |= step.planned.cached_tokens
            yield ReplayedPlan(index, snapshot, recorded, scheduler.plan(snapshot, cache))
            index += 1


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
        if requests := getattr(plan, name):
            yield f"{name.removesuffix('s')} {value_text(requests)}"
    yield f"{plan.predicted_s * 1e3:.2f} of {plan.budget_s * 1e3:.2f} ms"


def value_text(value: object) -> str:
    """Return a field of a plan as text: requests as ``rid`` or ``rid:tokens``, times in full."""
    if isinstance(value, StepStats):
        return str(value._asdict())
    if isinstance(value, tuple):
        items = (item if isinstance(item, str) else f"{item[0]}:{item[1]}" for item in value)
        return " ".join(items) or "none"
    return str(value.value if isinstance(value, Enum) else value)
