"""Offline requests at low priority, never preempted: an upper bound of offline throughput."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sglang_coserve.core.planning.plan_context import PlanContext
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.planning.token_budget import serve_by_priority
from sglang_coserve.core.policy import Policy

__all__ = ["NonPreemptivePolicy"]


@dataclass
class NonPreemptivePolicy(Policy):
    """Sarathi-Serve with two priorities but no preemption.

    ConServe's *Non-Preemptive* (§3.2, §6.1), an upper bound of offline throughput:
    online requests are admitted first, but wait for KV until running requests
    end. Only when decodes run out of KV is the last admitted offline request retracted,
    as in any engine.
    """

    name: ClassVar[str] = "non_preemptive"
    is_preemptive: ClassVar[bool] = False

    chunk_tokens: int = 2048
    """Tokens of a step, prefill and decode together."""

    def compose(self, batch: StepBuilder, context: PlanContext) -> None:
        """See ``Policy.compose``."""
        serve_by_priority(batch, context, self.chunk_tokens, may_retract=False)
