"""One step on its way through the executor."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.snapshot import SuspendedStep
from sglang_coserve.core.step import Lane, PrefillChunk, Served, StepResult
from sglang_coserve.simulator.request import SimRequest

__all__ = ["RunningBatch"]


@dataclass(slots=True)
class RunningBatch:
    """One step between ``Executor.begin`` and ``Executor.end``; it may be suspended meanwhile."""

    step: int
    """The number of its plan."""

    lane: Lane
    started_s: float

    chunks: list[tuple[SimRequest, int]]
    """Prefill rows and the tokens each computes."""

    decodes: list[SimRequest]
    online_decodes: int
    """Of ``decodes``, online rows."""

    stats: BatchStats
    """Sums over the rows in it."""

    seconds: float
    """How long it takes without being suspended."""

    evicted: list[SimRequest]
    """Rows whose KV the plan gave up; they wait again."""

    shed: list[SimRequest]
    """Requests the plan refused."""

    admitted: set[SimRequest] = field(default_factory=set)
    """Requests of ``chunks`` that held no KV before."""

    reloaded_tokens: int = 0
    """Tokens copied back from host memory while it runs."""

    opened_pages: int = 0
    """Pages that it has taken for what it computes."""

    done_share: float = 0.0
    """Part of its layers that is computed."""

    spent_s: float = 0.0
    """How long it has run, with what its resumptions took."""

    @property
    def has_offline(self) -> bool:
        """True when an offline row is in it."""
        return len(self.decodes) > self.online_decodes or any(
            not request.info.is_online for request, _ in self.chunks
        )

    @property
    def requests(self) -> list[SimRequest]:
        """Its rows. O(rows)."""
        return [*(request for request, _ in self.chunks), *self.decodes]

    def suspended(self) -> SuspendedStep:
        """Return what the scheduler sees of it while it is suspended."""
        return SuspendedStep(self.step, self.stats, self.done_share)

    def result(self, end_s: float) -> StepResult:
        """Return what came of it, once ``Executor.end`` is through with it. O(rows)."""
        served = [_served(request, end_s) for request, _ in self.chunks if request.info.is_online]
        # Each has its token now, and one from its prefill. What Served() does, at half its cost.
        new = tuple.__new__
        served += [
            new(Served, (request.info, request.token_times_s[-2], end_s))
            for request in self.decodes
            if request.info.request_class is RequestClass.ONLINE
        ]
        return StepResult(
            step=self.step,
            started_s=self.started_s,
            seconds=self.spent_s,
            batch=self.stats,
            chunks=tuple([PrefillChunk(r.info.rid, tokens) for r, tokens in self.chunks]),
            served=tuple(served),
        )

    def dropped(self) -> StepResult:
        """Return the result of a step that was given up. O(rows)."""
        rids = tuple([request.info.rid for request in self.requests])
        return StepResult(step=self.step, started_s=self.started_s, given_up=rids)

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
