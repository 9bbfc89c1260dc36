"""Online requests alone: the reference for their latency."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from sglang_coserve.core.planning.online_phase import decode_online, prefill_online
from sglang_coserve.core.planning.plan_context import PlanContext
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.policy import Policy

__all__ = ["OnlineOnlyPolicy"]


@dataclass
class OnlineOnlyPolicy(Policy):
    """Chunked prefill with a fixed token budget; offline requests never run.

    The *Online-Only* of ConServe §6.1 and the pure online serving of HyGen §5.1:
    the latencies that an SLO tolerance is relative to.
    """

    name: ClassVar[str] = "online_only"

    chunk_tokens: int = 2048
    """Most tokens of a step, prefill and decode together (Sarathi-Serve's budget)."""

    def compose(self, batch: StepBuilder, context: PlanContext) -> None:
        """See ``Policy.compose``."""
        batch.limit_tokens(self.chunk_tokens)
        decode_online(batch)
        prefill_online(batch, context, math.inf, keeps_ttft=False)
        batch.offline_budget_s = 0.0
