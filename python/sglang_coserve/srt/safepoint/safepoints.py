"""The safepoints of one scheduler: arms and disarms batches of the offline lane."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_coserve.srt.forward_kind import ForwardKind, kind_of, num_decodes
from sglang_coserve.srt.safepoint.arrival_watch import ArrivalWatch, StopRequest
from sglang_coserve.srt.safepoint.eligibility import why_batch_must_end
from sglang_coserve.srt.safepoint.flag import batch_id
from sglang_coserve.srt.safepoint.gates import DeadlineGate
from sglang_coserve.srt.safepoint.instrument import safepoint_cost_s
from sglang_coserve.srt.safepoint.placement import SafepointPlacement
from sglang_coserve.srt.safepoint.stats import SafepointStats

__all__ = ["Safepoints"]

ScheduleBatch = Any


class Safepoints:
    """Arms batches of the offline lane, and counts those that were suspended.

    All ranks arm the same batches; the rank that receives requests decides when they stop.
    """

    def __init__(
        self,
        placement: SafepointPlacement,
        watch: ArrivalWatch | None,
        deadline_gate: DeadlineGate | None,
        *,
        num_layers: int,
        interval: int,
    ) -> None:
        """``watch`` is None on ranks that do not receive requests, ``deadline_gate`` on all but
        rank 0."""
        self.stats = SafepointStats()
        self.gate = placement.gate
        self.resumption = placement.resumption
        self.num_layers = num_layers
        self._no_safepoints = placement.no_safepoints
        self._watch = watch
        self._due_gate = deadline_gate
        self._interval = interval
        self._stop_share = min(1.0, placement.outstanding_groups * interval / num_layers)
        self._cost_s = safepoint_cost_s(placement.gate)
        self._request: StopRequest | None = None

    @property
    def stop_share(self) -> float:
        """Largest share of a batch that still runs after a stop was requested."""
        return self._stop_share

    @property
    def decodes_stop(self) -> bool:
        """Whether batches of decodes can be suspended, too; if not they run to their end."""
        return ForwardKind.DECODE not in self._no_safepoints

    def why_it_must_end(self, batch: ScheduleBatch) -> str | None:
        """Return why a batch cannot stop at a safepoint; None if it can. O(requests)."""
        kind = kind_of(batch)
        if kind is None:
            return "neither a prefill nor a decode"
        if kind in self._no_safepoints:
            return self._no_safepoints[kind]
        return why_batch_must_end(batch, len(batch.reqs) - num_decodes(batch, kind))

    @contextmanager
    def armed(self, forward_count: int, until_s: float) -> Iterator[None]:
        """Let a pass in this context be stopped, for an arrival or at ``until_s``.

        The pass then raises ``ForwardPreempted``. ``forward_count`` identifies the batch;
        ``until_s`` is on the clock that all ranks share.
        """
        begun_s = time.perf_counter()
        name = batch_id(forward_count)
        if self._due_gate is not None:
            self._due_gate.until_s = until_s
        self.gate.arm(name)
        if self._watch is not None:
            self._watch.open(name)
        ready_s = time.perf_counter()
        try:
            yield
        finally:
            ended_s = time.perf_counter()
            self.gate.disarm()
            if self._watch is not None:
                self._request = self._watch.close()
            self.stats.ran(ready_s - begun_s + time.perf_counter() - ended_s, ended_s - ready_s)

    def suspended(self, kind: ForwardKind, now_s: float) -> None:
        """Record that the batch armed last was suspended; ``now_s`` is ``time.perf_counter``."""
        self.stats.suspended(kind, self._request, now_s)

    def report(self) -> dict[str, Any]:
        """Return the settings and statistics as plain values."""
        return {
            "enabled": True,
            "interval_layers": self._interval,
            "layers": self.num_layers,
            "cost_us": self._cost_s * 1e6,
            **self.stats.report(),
        }
