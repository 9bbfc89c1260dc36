"""What a scheduling policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from sglang_coserve.core.batch_builder import BatchBuilder
from sglang_coserve.core.offline_queue import OfflineQueueConfig
from sglang_coserve.core.plan_context import PlanContext
from sglang_coserve.core.snapshot import Row
from sglang_coserve.core.step import StepPlan, StepResult
from sglang_coserve.core.victims import last_admitted_first

__all__ = ["Policy", "SlicingPolicy"]


class Policy(ABC):
    """Composes the batch of one step: a paper's algorithm over the shared parts.

    ``compose`` must depend on nothing but its arguments and the policy's state, and
    only the methods that tell what happened may change that.
    """

    name: ClassVar[str]

    is_preemptive: ClassVar[bool] = True
    """Steps with offline work alone are suspended for online work, where the engine can."""

    @abstractmethod
    def compose(self, batch: BatchBuilder, context: PlanContext) -> None:
        """Add the work of the next step to the empty batch."""

    def queue_config(self, seed: int = 0) -> OfflineQueueConfig:
        """Return the order of its offline queue: deadlines at risk, then arrival."""
        return replace(OfflineQueueConfig.fcfs(), seed=seed)

    def victims(self, batch: BatchBuilder) -> Sequence[Row]:
        """Return the offline rows that may lose their KV, first to go first."""
        return last_admitted_first(batch)

    def update(self, plan: StepPlan, result: StepResult) -> None:  # noqa: B027
        """Take into account what came of a step; some of it ran."""

    def evicted(self) -> None:  # noqa: B027
        """Take into account that an offline request lost its KV."""

    def finished(self) -> None:  # noqa: B027
        """Take into account that an offline request ended that had been admitted."""


class SlicingPolicy(Policy):
    """One whose offline work may have steps of its own between those of online decodes.

    Its two halves are composed apart: which of both steps is better can be told from the first.
    """

    @abstractmethod
    def compose_online(self, batch: BatchBuilder, context: PlanContext) -> None:
        """Add the online work, and set ``batch.offline_budget_s``."""

    @abstractmethod
    def compose_offline(self, batch: BatchBuilder, context: PlanContext) -> None:
        """Add offline work within that."""

    def compose(self, batch: BatchBuilder, context: PlanContext) -> None:
        """See ``Policy.compose``."""
        self.compose_online(batch, context)
        self.compose_offline(batch, context)
