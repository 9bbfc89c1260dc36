"""What a policy sees besides the batch it composes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sglang_coserve.core.offline_queue import OfflineQueue
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import PrefixCache, Row

__all__ = ["PlanContext"]


@dataclass(frozen=True, slots=True)
class PlanContext:
    """The scheduler's state, for reading, during one call of ``plan``."""

    config: SchedulerConfig
    queue: OfflineQueue
    cache: PrefixCache
    waiting: Iterable[Row]
    """Waiting online requests in the order to serve them; to be iterated over once."""

    step: int
    """Number of the step; with the seed it makes draws reproducible."""

    margin: float
    """Part of a latency budget that offline work leaves free (``SchedulerConfig.margin``)."""

    arrival_wait_s: Callable[[float], float]
    """Longest wait of a request that arrives during the step (``SchedulerConfig.arrival_wait_s``),
    given the part of the step that it has to wait at most: below 1 where a safepoint ends the
    wait, and not the step."""

    arrivals_per_s: float
    """Online requests that arrive a second."""

    late_gaps: float
    """How many tokens of online decodes may still come late (``LateGaps``)."""
