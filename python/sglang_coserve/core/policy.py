"""The interface of scheduling policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.offline_queue import OfflineQueueConfig
from sglang_coserve.core.planning.offline_candidates import last_admitted_first
from sglang_coserve.core.planning.plan_context import PlanContext
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.planning.step_requests import StepRequests
from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step import StepPlan, StepResult

__all__ = ["Policy"]


class Policy(ABC):
    """Composes the batch of one step: a paper's algorithm on top of the shared code.

    ``compose`` must depend only on its arguments and the policy's state, and must not change
    that state. Only ``update``, ``retracted`` and ``finished`` may change it.
    """

    name: ClassVar[str]

    is_preemptive: ClassVar[bool] = True
    """Whether offline-only steps are suspended for online work, if the engine can do so."""

    @abstractmethod
    def compose(self, batch: StepBuilder, context: PlanContext) -> None:
        """Add the work of the next step to the empty batch."""

    def queue_config(self, seed: int = 0) -> OfflineQueueConfig:
        """Return the order of its offline queue; here deadlines at risk first, then by arrival."""
        return replace(OfflineQueueConfig.fcfs(), seed=seed)

    def victims(
        self,
        requests: StepRequests,
        model: LatencyModel,  # noqa: ARG002
    ) -> Sequence[Request]:
        """Return the offline requests that may be retracted, the first to retract first."""
        return last_admitted_first(requests)

    def update(self, plan: StepPlan, result: StepResult) -> None:  # noqa: B027
        """Learn from the result of a step, of which at least a part ran."""

    def retracted(self) -> None:  # noqa: B027
        """Record that an offline request was retracted."""

    def finished(self) -> None:  # noqa: B027
        """Record that an admitted offline request has ended."""
