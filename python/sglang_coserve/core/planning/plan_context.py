"""The scheduler's state that a policy may read while it composes a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_coserve.core.offline_queue import OfflineQueue
from sglang_coserve.core.planning.offline_candidates import OfflineCandidates
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import Request
from sglang_coserve.metrics import SloTargets

__all__ = ["PlanContext"]


@dataclass(frozen=True, slots=True)
class PlanContext:
    """Read-only state of the scheduler during one call of ``plan``."""

    config: SchedulerConfig
    queue: OfflineQueue
    candidates: OfflineCandidates
    waiting: Iterable[Request]
    """Waiting online requests in the order to serve them; may be iterated over only once."""

    targets: SloTargets
    """TTFT and TPOT targets of online requests without their own."""

    step: int
    """Number of the step; together with the seed it makes random draws reproducible."""

    arrival_s: float
    """Longest time that a request arriving during the step may wait for its end."""

    gap_share: float
    """Share of the online decodes' slack that offline work may take."""

    shed_share: float
    """Under ``Overload.SHED``: share of the time until its TTFT deadline that a request's first
    token may be predicted to take; above it the request is refused."""

    shed_pace: float
    """Under ``Overload.SHED``: share of the TPOT slack that a step may take."""

    gaps_per_request: float
    """Mean number of gaps between the tokens of an online request."""
