"""What a scheduling policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from sglang_coserve.core.batch_builder import BatchBuilder
from sglang_coserve.core.offline_queue import OfflineQueueConfig
from sglang_coserve.core.plan_context import PlanContext
from sglang_coserve.core.preemption import last_admitted_first
from sglang_coserve.core.snapshot import Row, StepPlan

__all__ = ["Policy"]


class Policy(ABC):
    """Composes the batch of one iteration: a paper's algorithm over the shared parts.

    ``compose`` must depend on nothing but its arguments and the policy's state,
    and only ``commit`` may change that.
    """

    name: ClassVar[str]

    @abstractmethod
    def compose(self, batch: BatchBuilder, context: PlanContext) -> None:
        """Add the work of the next iteration to the empty batch."""

    def queue_config(self, seed: int = 0) -> OfflineQueueConfig:
        """Return the order of the offline queue that goes with the policy: by arrival."""
        return replace(OfflineQueueConfig.fcfs(), seed=seed)

    def victims(self, batch: BatchBuilder) -> Sequence[Row]:
        """Return the offline rows that may lose their KV, first to go first."""
        return last_admitted_first(batch)

    def commit(self, plan: StepPlan) -> None:  # noqa: B027
        """Take into account that ``plan`` is carried out."""
