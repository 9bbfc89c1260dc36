"""Stock SGLang with ``--enable-priority-scheduling``: offline requests have the lower priority."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.planning.plan_context import PlanContext
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.planning.step_requests import StepRequests
from sglang_coserve.core.planning.token_budget import serve_by_priority
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.snapshot import Request

__all__ = ["PriorityPolicy"]


@dataclass
class PriorityPolicy(Policy):
    """Serves requests by priority, then arrival; retracts running ones for a higher priority.

    The chunk size bounds prefill tokens only; all decodes run. For an online request
    that lacks KV or a slot, offline requests are retracted, the last admitted
    first, whatever their state. Offline and online prefills of one
    step differ only in their order.

    Differences from SGLang: decodes run along with prefills, as with
    ``--enable-mixed-chunk``; the stock default stalls them for every prefill.
    The first tokens of a retracted request stay in the prefix cache.
    """

    name: ClassVar[str] = "priority"
    is_preemptive: ClassVar[bool] = False

    chunk_tokens: int = 8192
    """Prefill tokens of a step (``--chunked-prefill-size``)."""

    def victims(
        self,
        requests: StepRequests,
        model: LatencyModel,  # noqa: ARG002
    ) -> Sequence[Request]:
        """See ``Policy.victims``: the last admitted first."""
        return [
            request
            for request in reversed(requests.snapshot.admitted)
            if not request.info.is_online
        ]

    def compose(self, batch: StepBuilder, context: PlanContext) -> None:
        """See ``Policy.compose``."""
        decodes = len(batch.requests.online_decodes) + len(batch.requests.offline_decodes)
        serve_by_priority(batch, context, self.chunk_tokens + decodes, may_retract=True)
