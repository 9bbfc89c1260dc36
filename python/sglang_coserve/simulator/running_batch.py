"""One iteration on its way through the executor."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.step import PrefillChunk, Served, StepResult
from sglang_coserve.simulator.request import SimRequest

__all__ = ["RunningBatch"]


@dataclass(slots=True)
class RunningBatch:
    """One iteration between ``Executor.begin`` and ``Executor.end``."""

    chunks: list[tuple[SimRequest, int]]
    """Prefill rows and the tokens each computes."""

    decodes: list[SimRequest]
    online_decodes: int
    """Of ``decodes``, online rows."""

    stats: BatchStats
    """Sums over the rows in it."""

    seconds: float
    """How long it takes unless aborted."""

    evicted: list[SimRequest]
    """Rows whose KV the plan gave up; they wait again."""

    shed: list[SimRequest]
    """Requests the plan refused."""

    admitted: set[SimRequest] = field(default_factory=set)
    """Requests of ``chunks`` that held no KV before."""

    reloaded_tokens: int = 0
    """Tokens copied back from host memory while it runs."""

    given_up: tuple[str, ...] = ()
    """Offline requests that a safepoint took out of it."""

    @property
    def is_aborted(self) -> bool:
        """True when a safepoint ended its offline part early."""
        return bool(self.given_up)

    @property
    def has_offline(self) -> bool:
        """True when an offline row is in it."""
        return len(self.decodes) > self.online_decodes or any(
            not request.info.is_online for request, _ in self.chunks
        )

    def online_stats(self) -> BatchStats:
        """Return the sums over its online rows. O(rows)."""
        return BatchStats.of(
            ((n, r.computed_tokens) for r, n in self.chunks if r.info.is_online),
            (r.computed_tokens for r in self.decodes if r.info.is_online),
        )

    def result(self, step: int, start_s: float, seconds: float, end_s: float) -> StepResult:
        """Return what came of it, once ``Executor.end`` is through with it. O(rows)."""
        served = [_served(request, end_s) for request, _ in self.chunks if request.info.is_online]
        served += [_served(request, end_s) for request in self.decodes if request.info.is_online]
        return StepResult(
            step=step,
            started_s=start_s,
            seconds=seconds,
            batch=self.stats,
            chunks=tuple([PrefillChunk(r.info.rid, tokens) for r, tokens in self.chunks]),
            served=tuple(served),
            given_up=self.given_up,
        )

    def offline_rids(self) -> list[str]:
        """Return the offline requests in it. O(rows)."""
        requests = [*(request for request, _ in self.chunks), *self.decodes]
        return [request.info.rid for request in requests if not request.info.is_online]

    def tokens_by_class(self) -> tuple[int, int]:
        """Return the tokens computed for online and for offline rows. O(chunks)."""
        online, offline = self.online_decodes, len(self.decodes) - self.online_decodes
        for request, tokens in self.chunks:
            if request.info.is_online:
                online += tokens
            else:
                offline += tokens
        return online, offline


def _served(request: SimRequest, end_s: float) -> Served:
    times_s = request.token_times_s
    if not times_s or times_s[-1] != end_s:
        return Served(request.info, times_s[-1] if times_s else None, None)
    return Served(request.info, times_s[-2] if len(times_s) > 1 else None, end_s)
