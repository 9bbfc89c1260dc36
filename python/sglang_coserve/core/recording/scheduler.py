"""A scheduler that records the calls made to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sglang_coserve.core.advisory import Advisory
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.interference import Interference
from sglang_coserve.core.control.slo import Slo
from sglang_coserve.core.latency_model import LatencyModel, LatencyProfile
from sglang_coserve.core.offline_queue import OfflineQueue, QueuedRequest
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.prediction_error import PredictionError
from sglang_coserve.core.recording.events import (
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
from sglang_coserve.core.request import Ending
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import EngineSnapshot, PrefixCache, RequestInfo
from sglang_coserve.core.step import PrefillChunk, StepPlan, StepResult
from sglang_coserve.core.work_log import WorkLog

__all__ = ["RecordingScheduler", "SchedulerSetup"]


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

    def make(self, policy: str | None = None, advisory: Advisory | None = None) -> Scheduler:
        """Return a new scheduler, with another policy if one is named.

        ``advisory`` calls what judges and learns; see ``Scheduler``.

        Raises:
            ConfigError: no policy has this name.
        """
        made = make_policy(self.policy if policy is None else policy, self.config)
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


class RecordingScheduler:
    """A ``Scheduler`` that passes every successful call to ``sink`` as an event.

    Snapshots and plans are passed on without copies, since they are immutable.
    """

    def __init__(self, scheduler: Scheduler, sink: Callable[[Event], None]) -> None:
        """Record the calls to ``scheduler``, which must be new."""
        self._scheduler = scheduler
        self._sink = sink

    @property
    def model(self) -> LatencyModel:
        """See ``Scheduler.model``."""
        return self._scheduler.model

    @property
    def prediction_error(self) -> PredictionError:
        """See ``Scheduler.prediction_error``."""
        return self._scheduler.prediction_error

    @property
    def queue(self) -> OfflineQueue:
        """See ``Scheduler.queue``."""
        return self._scheduler.queue

    @property
    def interference(self) -> Interference:
        """See ``Scheduler.interference``."""
        return self._scheduler.interference

    @property
    def work(self) -> WorkLog:
        """See ``Scheduler.work``."""
        return self._scheduler.work

    def arrived(self, info: RequestInfo, cached_tokens: int = 0) -> None:
        """See ``Scheduler.arrived``."""
        self._scheduler.arrived(info, cached_tokens)
        self._sink(Arrived(info, cached_tokens))

    def add_offline(self, request: QueuedRequest) -> None:
        """See ``Scheduler.add_offline``."""
        self._scheduler.add_offline(request)
        self._sink(OfflineAdded(request))

    def cached(self, rid: str, cached_tokens: int) -> None:
        """See ``Scheduler.cached``."""
        self._scheduler.cached(rid, cached_tokens)
        self._sink(Cached(rid, cached_tokens))

    def no_room(self, rid: str) -> None:
        """See ``Scheduler.no_room``."""
        self._scheduler.no_room(rid)
        self._sink(NoRoom(rid))

    def plan(self, snapshot: EngineSnapshot, cache: PrefixCache) -> StepPlan:
        """See ``Scheduler.plan``."""
        answers = _NotedAnswers(cache)
        plan = self._scheduler.plan(snapshot, answers)
        # A snapshot may look at those who wait when they are asked for; a record has them all.
        whole = replace(snapshot, waiting=list(snapshot.waiting))
        self._sink(Planned(whole, answers.noted, plan))
        return plan

    def start(self, plan: StepPlan, chunks: Sequence[PrefillChunk]) -> None:
        """See ``Scheduler.start``."""
        self._scheduler.start(plan, chunks)
        self._sink(Started(tuple(chunks)))

    def update(self, result: StepResult) -> None:
        """See ``Scheduler.update``."""
        self._scheduler.update(result)
        self._sink(Updated(result))

    def restore(self, rid: str, generated_tokens: int) -> None:
        """See ``Scheduler.restore``."""
        self._scheduler.restore(rid, generated_tokens)
        self._sink(Restored(rid, generated_tokens))

    def finish(self, rid: str, ending: Ending = Ending.COMPLETE) -> None:
        """See ``Scheduler.finish``."""
        self._scheduler.finish(rid, ending)
        self._sink(Finished(rid, ending))


class _NotedAnswers:
    """A ``PrefixCache`` that records its answers."""

    def __init__(self, cache: PrefixCache) -> None:
        self.noted: dict[str, int | None] = {}
        self._cache = cache

    def cached_tokens(self, rid: str) -> int | None:
        tokens = self.noted[rid] = self._cache.cached_tokens(rid)
        return tokens
