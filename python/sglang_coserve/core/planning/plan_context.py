"""The scheduler's state that a policy may read while it composes a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sglang_coserve.core.offline_queue import OfflineQueue, QueuedRequest
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import PrefixCache, Request
from sglang_coserve.metrics import SloTargets

__all__ = ["PlanContext"]


@dataclass(frozen=True, slots=True)
class PlanContext:
    """Read-only state of the scheduler during one call of ``plan``."""

    config: SchedulerConfig
    queue: OfflineQueue
    cache: PrefixCache
    now_s: float
    waiting: Iterable[Request]
    """Waiting online requests in the order to serve them; may be iterated over only once."""

    targets: SloTargets
    """TTFT and TPOT targets of online requests without their own."""

    step: int
    """Number of the step; together with the seed it makes random draws reproducible."""

    arrival_s: float
    """Longest time, in seconds, that offline work may add to the TTFT of a request that arrives
    now."""

    prompt_s: float
    """Longest time, in seconds, that the step may add to the TTFT of the requests that wait."""

    gap_s: Callable[[float], float]
    """Returns the longest time, in seconds, that offline work may add to a step whose online
    decodes could wait so much longer: see ``Allowance``."""

    timely: float
    """Share of a time until which a step must be predicted to end, to end in that time."""

    is_plain: bool
    """Online work runs as in plain SGLang: no offline work is there, and no target asks for
    other latencies."""

    mixes_decodes: bool
    """Plain SGLang would run decodes in the same step as prompts, instead of after them."""

    def candidates(self) -> Iterator[tuple[QueuedRequest, int]]:
        """Yield the offline requests that may be admitted, each with its tokens in the prefix
        cache; without those whose KV is being loaded. Looks each up when it is reached."""
        for request in self.queue.candidates(self.now_s):
            cached_tokens = self.cache.cached_tokens(request.rid)
            if cached_tokens is not None:
                yield request, cached_tokens
