"""The settings from which a scheduler is created."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_coserve.core.advisory import Advisory
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.slo import Slo
from sglang_coserve.core.latency_model import LatencyProfile
from sglang_coserve.core.offline_queue import OfflineQueue
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import SchedulerConfig

__all__ = ["SchedulerSetup"]


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
