"""A scheduler that records the calls made to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sglang_coserve.core.advisory import Advisory
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.slo import Slo
from sglang_coserve.core.latency_model.profile import LatencyProfile
from sglang_coserve.core.offline_queue import OfflineQueue, QueuedRequest
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.request import Ending
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import EngineSnapshot, PrefixCache, RequestInfo
from sglang_coserve.core.step import PrefillChunk, StepPlan, StepResult
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
        made = make_policy(self.policy, self.config)
        queue = OfflineQueue(made.queue_config(self.config.seed))
        report = self.profile.report
        return Scheduler(
            made,
            self.profile.latency_model,
            self.slos,
            queue,
            self.config,
            engine=self.engine,
            profile_mape=None if report is None else report.mape,
            advisory=advisory,
        )


class RecordingScheduler(Scheduler):
    """A scheduler that passes every successful call to ``sink`` as an event.

    Snapshots and plans are passed on without copies, since they are immutable.
    """

    def __init__(self, scheduler: Scheduler, sink: Callable[[Event], None]) -> None:
        """Be ``scheduler``, which must be new, in all but what is recorded."""
        self.__dict__ = scheduler.__dict__
        self._sink = sink

    def arrived(self, info: RequestInfo, cached_tokens: int = 0) -> None:
        """See ``Scheduler.arrived``."""
        super().arrived(info, cached_tokens)
        self._sink(Arrived(info, cached_tokens))

    def add_offline(self, request: QueuedRequest) -> None:
        """See ``Scheduler.add_offline``."""
        super().add_offline(request)
        self._sink(OfflineAdded(request))

    def cached(self, rid: str, cached_tokens: int) -> None:
        """See ``Scheduler.cached``."""
        super().cached(rid, cached_tokens)
        self._sink(Cached(rid, cached_tokens))

    def no_room(self, rid: str) -> None:
        """See ``Scheduler.no_room``."""
        super().no_room(rid)
        self._sink(NoRoom(rid))

    def plan(self, snapshot: EngineSnapshot, cache: PrefixCache) -> StepPlan:
        """See ``Scheduler.plan``."""
        answers = _NotedAnswers(cache)
        plan = super().plan(snapshot, answers)
        # A snapshot may look at those who wait when they are asked for; a record has them all.
        whole = replace(snapshot, waiting=list(snapshot.waiting))
        self._sink(Planned(whole, answers.noted, plan))
        return plan

    def start(self, plan: StepPlan, chunks: Sequence[PrefillChunk]) -> None:
        """See ``Scheduler.start``."""
        super().start(plan, chunks)
        self._sink(Started(tuple(chunks)))

    def update(self, result: StepResult) -> None:
        """See ``Scheduler.update``."""
        super().update(result)
        self._sink(Updated(result))

    def restore(self, rid: str, generated_tokens: int) -> None:
        """See ``Scheduler.restore``."""
        super().restore(rid, generated_tokens)
        self._sink(Restored(rid, generated_tokens))

    def finish(self, rid: str, ending: Ending = Ending.COMPLETE) -> None:
        """See ``Scheduler.finish``."""
        super().finish(rid, ending)
        self._sink(Finished(rid, ending))


class _NotedAnswers:
    """A ``PrefixCache`` that records its answers."""

    def __init__(self, cache: PrefixCache) -> None:
        self.noted: dict[str, int | None] = {}
        self._cache = cache

    def cached_tokens(self, rid: str) -> int | None:
        tokens = self.noted[rid] = self._cache.cached_tokens(rid)
        return tokens
