"""Builds the core scheduler from the settings."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.latency_model import LatencyProfile
from sglang_coserve.core.recording import SchedulerSetup
from sglang_coserve.core.scheduler_config import OnlineOrder, Overload, SchedulerConfig
from sglang_coserve.srt.monitoring.plan_log import FailedPlans

__all__ = ["core_setup", "failed_plans"]


def core_setup(
    config: CoserveConfig, profile: LatencyProfile, engine: EngineSize
) -> SchedulerSetup:
    """Return the policy, the targets and the limits of ``config``.

    ``engine`` has the limits for the no-interference baseline.
    """
    return SchedulerSetup(
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


def failed_plans(setup: SchedulerSetup, config: CoserveConfig) -> FailedPlans:
    """Return what writes down what plans were made from that failed.

    It is beside the batches, as it is as confidential, or in a directory of this user's.
    """
    if config.coserve_data_dir is not None:
        return FailedPlans(setup, Path(config.coserve_data_dir) / "failed-plans")
    own = f"coserve-failed-plans-{os.getuid()}"
    return FailedPlans(setup, Path(tempfile.gettempdir()) / own)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
