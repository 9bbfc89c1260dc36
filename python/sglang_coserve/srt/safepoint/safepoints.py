"""The safepoints of one scheduler: the life of a batch that may be aborted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.preemption import wasted_s
from sglang_coserve.core.preemption_guard import GuardConfig, PreemptionGuard
from sglang_coserve.srt.request_marks import is_offline
from sglang_coserve.srt.safepoint.arrival_watch import AbortRequest, ArrivalWatch
from sglang_coserve.srt.safepoint.due_gate import DueGate
from sglang_coserve.srt.safepoint.eligibility import can_shrink, why_batch_must_end
from sglang_coserve.srt.safepoint.flag import batch_id
from sglang_coserve.srt.safepoint.in_flight import (
    BatchKind,
    InFlight,
    kind_of,
    num_decodes,
    stats_of,
)
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted, safepoint_cost_s
from sglang_coserve.srt.safepoint.placement import Placement
from sglang_coserve.srt.safepoint.stats import SafepointStats

__all__ = ["ArmedBatch", "Safepoints"]

ScheduleBatch = Any


@dataclass(frozen=True)
class ArmedBatch:
    """A batch that may be aborted."""

    kind: BatchKind
    whole: BatchStats
    online: BatchStats
    offline_rids: tuple[str, ...]
    shrinks: bool
    """Its online rows go on if it is aborted."""

    @property
    def offline(self) -> BatchStats:
        """Sums over its offline rows."""
        return BatchStats(*(a - b for a, b in zip(self.whole, self.online, strict=True)))


class Safepoints:
    """Arms batches with offline rows, and accounts for those that were aborted.

    All ranks arm the same batches; the one that receives requests decides on them.
    """

    def __init__(
        self,
        placement: Placement,
        watch: ArrivalWatch | None,
        guard: GuardConfig,
        *,
        num_layers: int,
        interval: int,
        due_gate: DueGate | None = None,
    ) -> None:
        """``watch`` is None on the ranks that do not receive requests."""
        self.stats = SafepointStats()
        self.guard = PreemptionGuard(guard)
        self.gate = placement.gate
        self._kept = placement.kept
        self.resumption = placement.resumption
        self._watch = watch
        self.num_layers = num_layers
        self._due_gate = due_gate
        self._interval = interval
        self._abort_share = min(1.0, placement.outstanding_groups * interval / num_layers)
        self._cost_s = safepoint_cost_s(placement.gate)
        self._request: AbortRequest | None = None

    @property
    def stop_share(self) -> float:
        """Part of a batch that passes at most from a request to stop it until it does."""
        return self._abort_share

    # --- Before a batch ------------------------------------------------------------------

    def arrival_wait_share(self, now_s: float, *, may_prefill: bool) -> float:
        """Return the part of the next step that an arrival waits at most; 1 if that step may not
        be aborted. One that cannot prefill will be a decode step."""
        kinds = (BatchKind.EXTEND, BatchKind.MIXED) if may_prefill else (BatchKind.DECODE,)
        can_abort = self.guard.may_abort(now_s) and not any(kind in self._kept for kind in kinds)
        return self._abort_share if can_abort else 1.0

    def why_not(self, batch: ScheduleBatch, now_s: float) -> str | None:
        """Return why a batch with offline rows is not to be aborted; None if it may be.

        ``now_s`` is when the pass began, on the clock that all ranks share: in one pass the
        answer does not change.
        """
        if not self.guard.can_afford(now_s):
            return "aborts have cost their share of the time"
        if self.guard.protects(req.rid for req in batch.reqs):
            return "a request of it was aborted too often in a row"
        return self.why_it_must_end(batch)

    def why_it_must_end(self, batch: ScheduleBatch) -> str | None:
        """Return why a batch cannot stop at a safepoint; None if it can."""
        kind = kind_of(batch)
        if kind is None:
            return "neither a prefill nor a decode"
        if kind in self._kept:
            return self._kept[kind]
        return why_batch_must_end(batch, len(batch.reqs) - num_decodes(batch, kind))

    # --- During a batch ------------------------------------------------------------------

    @contextmanager
    def armed(
        self, batch: ScheduleBatch, forward_count: int, model: LatencyModel, arrival_wait_s: float
    ) -> Iterator[ArmedBatch]:
        """Within it ``ForwardPreempted`` may be raised; it is passed on. O(rows).

        ``forward_count`` tells batches apart; ``model`` predicts this one;
        ``arrival_wait_s`` is how long an arrival may wait for its end.
        """
        begun_s = time.perf_counter()
        kind = kind_of(batch)
        assert kind is not None
        is_online = [not is_offline(req) for req in batch.reqs]
        armed = ArmedBatch(
            kind,
            stats_of(batch, kind, [True] * len(is_online)),
            stats_of(batch, kind, is_online),
            tuple(req.rid for req, online in zip(batch.reqs, is_online, strict=True) if not online),
            self.resumption is not None
            and can_shrink(batch, len(batch.reqs) - num_decodes(batch, kind)),
        )
        name, started_s = batch_id(forward_count), time.perf_counter()
        self.gate.arm(name, started_s)
        if self._watch is not None:
            in_flight = InFlight(
                batch=name,
                started_s=started_s,
                whole=armed.whole,
                online=armed.online,
                restarts_online=not armed.shrinks,
                model=model,
                arrival_wait_s=arrival_wait_s,
                abort_share=self._abort_share,
            )
            self._watch.open(in_flight)
        ready_s = time.perf_counter()
        try:
            yield armed
        finally:
            ended_s = time.perf_counter()
            self.gate.disarm()
            if self._watch is not None:
                self._request = self._watch.close()
            arming_s = ready_s - begun_s + time.perf_counter() - ended_s
            self.stats.ran(arming_s, ended_s - ready_s)

    @contextmanager
    def stoppable(self, forward_count: int, until_s: float) -> Iterator[None]:
        """Within it ``ForwardPreempted`` may be raised, for an arrival or when time is up.

        ``until_s`` is on the clock that all ranks share.
        """
        name = batch_id(forward_count)
        if self._due_gate is not None:
            self._due_gate.until_s = until_s
        self.gate.arm(name, time.perf_counter())
        if self._watch is not None:
            self._watch.open_stoppable(name)
        try:
            yield
        finally:
            self.gate.disarm()
            if self._watch is not None:
                self._request = self._watch.close()

    # --- After a batch -------------------------------------------------------------------

    def completed(self, armed: ArmedBatch) -> None:
        """Note that a batch ran to its end."""
        self.guard.completed(armed.offline_rids)

    def aborted(
        self,
        armed: ArmedBatch,
        preempted: ForwardPreempted,
        aborted_s: float,
        now_s: float,
        *,
        shrunk: bool = False,
    ) -> None:
        """Note that a batch was aborted, and is rolled back by now: if ``shrunk``, but for its
        online rows.

        ``aborted_s`` is on this process's clock, ``now_s`` on the one that all ranks share.
        """
        lost_s = preempted.elapsed_s
        if shrunk:
            lost_s = wasted_s(armed.whole, armed.online, lost_s)
            self.stats.shrunk[armed.kind] += 1
        self.guard.aborted(armed.offline_rids, now_s, lost_s)
        self.stats.wasted(lost_s, armed.offline, preempted.layer / self.num_layers)
        self.stats.aborted(armed.kind, self._request, aborted_s, time.perf_counter())

    def forget(self, rid: str) -> None:
        """Drop what is known of a request that has ended."""
        self.guard.forget(rid)
        self.stats.forget(rid)

    def report(self) -> dict[str, Any]:
        """Return the state in plain values."""
        return {
            "enabled": True,
            "interval_layers": self._interval,
            "layers": self.num_layers,
            "cost_us": self._cost_s * 1e6,
            **self.stats.report(),
        }
