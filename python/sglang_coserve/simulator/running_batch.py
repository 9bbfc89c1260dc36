"""One iteration on its way through the executor."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_coserve.core.batch_stats import BatchStats
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

    is_aborted: bool = False

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
