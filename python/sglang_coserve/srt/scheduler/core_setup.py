"""Builds the core scheduler from the settings."""

from __future__ import annotations

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.advisory import Advisory
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.latency_model import LatencyProfile
from sglang_coserve.core.recording import RecordingScheduler, SchedulerSetup
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import OnlineOrder, Overload, SchedulerConfig
from sglang_coserve.srt.monitoring.plan_log import recorded

__all__ = ["make_core_scheduler"]


def make_core_scheduler(
    config: CoserveConfig,
    profile: LatencyProfile,
    engine: EngineSize,
    advisory: Advisory,
    *,
    records: bool,
) -> Scheduler | RecordingScheduler:
    """Return a scheduler with the policy, the targets and the limits of ``config``.

    ``advisory`` calls what judges, learns and records.

    ``engine`` has the limits for the no-interference baseline. With ``records`` this rank writes
    the recording, if one is configured.

    Raises:
        ConfigError: the recording cannot be written.
    """
    setup = SchedulerSetup(
        policy=config.offline_policy,
        slos=config.slos(),
        config=SchedulerConfig(
            iteration_budget_s=_seconds(config.iteration_budget_ms),
            max_offline_requests=config.offline_max_running,
            online_order=OnlineOrder(config.online_order),
            overload=Overload(config.overload),
            utility_ratio=config.offline_utility_ratio,
            random_picks=config.offline_random_picks,
            refine=True,
        ),
        profile=profile,
        engine=engine,
    )
    if records and config.record_plans is not None:
        return recorded(setup, config.record_plans, advisory)
    return setup.make(advisory=advisory)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
