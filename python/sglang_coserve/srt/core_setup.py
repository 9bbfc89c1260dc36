"""Builds the core scheduler from the settings."""

from __future__ import annotations

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.latency_model import LatencyProfile
from sglang_coserve.core.offline_queue import OfflineQueue
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import SchedulerConfig

__all__ = ["make_core_scheduler"]


def make_core_scheduler(config: CoserveConfig, profile: LatencyProfile) -> Scheduler:
    """Return a scheduler with the policy and the targets of ``config``."""
    policy = make_policy(config.offline_policy)
    settings = SchedulerConfig(
        iteration_budget_s=_seconds(config.iteration_budget_ms),
        max_offline_rows=config.offline_max_running,
        refine=True,
    )
    queue = OfflineQueue(policy.queue_config())
    return Scheduler(
        policy,
        profile.latency_model,
        config.slo_targets(),
        queue,
        settings,
        profile_mape=None if profile.report is None else profile.report.mape,
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
