"""What a policy sees besides the batch it composes."""

from __future__ import annotations

from collections.abc import Iterable
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

    iteration: int
    """Plans committed so far; with the seed it makes draws reproducible."""

    margin: float
    """Part of a latency budget that offline work leaves free (``SchedulerConfig.margin``)."""

    arrival_wait_s: float
    """Longest wait of a request that arrives during the iteration, for its end
    (``SchedulerConfig.arrival_wait_s``)."""

    arrivals_per_s: float
    """Online requests that arrive a second."""

    mean_iteration_s: float
    """Moving average of the predicted latency of past iterations (BROS's T_avg)."""

    late_gaps: float
    """How many tokens of online decodes may still come late (``LateGaps``)."""

    eviction_rate: float
    """Moving estimate of how many offline admissions end in an eviction, 0 to 1."""
