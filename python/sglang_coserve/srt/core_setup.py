"""Builds the core scheduler from the settings."""

from __future__ import annotations

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.latency_model import PolynomialModel
from sglang_coserve.core.offline_queue import OfflineQueue
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.metrics import SloTargets

__all__ = ["make_core_scheduler"]


def make_core_scheduler(config: CoserveConfig) -> Scheduler:
    """Return a scheduler with the policy, the targets and the latency model of ``config``."""
    policy = make_policy(config.offline_policy)
    targets = SloTargets(
        None if config.slo_ttft_ms is None else config.slo_ttft_ms / 1e3,
        None if config.slo_tpot_ms is None else config.slo_tpot_ms / 1e3,
    )
    model = PolynomialModel(
        compute_token_s=2e-4, attention_pair_s=1e-8, context_token_s=1e-7, iteration_s=5e-3
    )
    queue = OfflineQueue(policy.queue_config())
    return Scheduler(policy, model, targets, queue, SchedulerConfig(refine=True))
