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

    step: int
    """Number of the step; with the seed it makes draws reproducible."""

    arrival_s: float
    """Longest time that a request which arrives during the step may wait for its end."""

    gap_share: float
    """Part of what a decode leaves of the time until its deadline that offline work may take."""

    shed_share: float
    """Part of the time until its deadline that a request's first token may be predicted to take,
    where what takes longer is refused."""

    shed_pace: float
    """There, part of the time until a decode misses its target that a step may take."""

    gaps_per_request: float
    """Between the tokens of an online request, on average."""
