"""Sarathi-Serve with two priorities and preemption: the papers' strongest baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sglang_coserve.core.planning.plan_context import PlanContext
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.planning.token_budget import serve_by_priority
from sglang_coserve.core.policy import Policy

__all__ = ["SarathiPolicy"]


@dataclass
class SarathiPolicy(Policy):
    """Stall-free batching under a fixed token budget, online first.

    ConServe's *Sarathi-Preemptive* (§6.1) and HyGen's *Sarathi++* (§5.1): every
    step has all decodes, and prefill chunks up to the budget, those of
    online requests first. Offline requests are retracted when memory is short.
    Latency is not considered: a step with the same token budget is short with little cached
    context and long with much (ConServe §4.2).
    """

    name: ClassVar[str] = "sarathi"
    is_preemptive: ClassVar[bool] = False

    chunk_tokens: int = 2048
    """Tokens of a step, prefill and decode together."""

    def compose(self, batch: StepBuilder, context: PlanContext) -> None:
        """See ``Policy.compose``."""
        serve_by_priority(batch, context, self.chunk_tokens, may_retract=True)
