"""Runs a batch that SGLang has prepared, which what arrives online may end early.

A batch that ends early has computed nothing that counts: its rows are put back to where
the next pass finds them, all of them or, where the online rows can go on, the offline
ones. Batches without offline rows, and all batches where there are no safepoints, are
SGLang's alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglang.srt.managers.utils import GenerationBatchResult

from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.srt.engine_view import EngineView
from sglang_coserve.srt.offline_lane import OfflineLane
from sglang_coserve.srt.rank_clock import RankClock
from sglang_coserve.srt.request_marks import is_offline
from sglang_coserve.srt.safepoint.counted_penalties import CountedPenalties
from sglang_coserve.srt.safepoint.in_flight import BatchKind, kind_of
from sglang_coserve.srt.safepoint.install import Installed
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted
from sglang_coserve.srt.safepoint.prepared_rows import split_prepared
from sglang_coserve.srt.safepoint.rollback import roll_back
from sglang_coserve.srt.safepoint.run_ahead import order_behind_pass
from sglang_coserve.srt.safepoint.safepoints import ArmedBatch, Safepoints

__all__ = ["PREEMPTED", "StepRunner", "StepTerms"]

Req = Any
ScheduleBatch = Any

PREEMPTED: Final = GenerationBatchResult()
"""The result of a batch that has none: it was suspended, or rolled back as a whole."""

Forward = Callable[[ScheduleBatch], Any]


@dataclass(frozen=True, slots=True)
class StepTerms:
    """What a step goes by that may end early, and who is told if it does."""

    began_s: float
    """When its pass began, on the clock that all ranks share."""

    arrival_wait_s: float
    """How long an online request that arrives meanwhile may wait for its end."""

    model: LatencyModel
    """Predicts it."""

    until_s: float | None
    """When a step of the offline lane must have stopped, on the same clock; None: of the other."""

    gave_up: Callable[[Sequence[str], ScheduleBatch | None], None]
    """Called with the names of the rows that were taken out, and the batch of the others, which
    goes on; None if all were."""

    suspended: Callable[[], None]
    """Called when a step of the offline lane has stopped."""


class StepRunner:
    """See the module's docstring."""

    def __init__(
        self,
        scheduler: Any,
        view: EngineView,
        clock: RankClock,
        events: Counter[str],
        installed: Installed,
    ) -> None:
        self.safepoints = installed.safepoints
        self.why_no_safepoints = installed.why_not
        self.suspends = installed.suspends
        self.lane: OfflineLane | None = None
        """To be set where steps are suspended."""

        self.counted_penalties = CountedPenalties()
        self._counts: Counter[str] = Counter()
        self._scheduler = scheduler
        self._view = view
        self._clock = clock
        self._events = events

    @property
    def stop_share(self) -> float:
        """Part of a step of the offline lane that passes at most until it is suspended; 1 where
        there is no such lane."""
        return self.safepoints.stop_share if self.suspends and self.safepoints else 1.0

    # --- Before a step -------------------------------------------------------------------

    def arrival_wait_shares(self, now_s: float, *, may_prefill: bool) -> tuple[float, float]:
        """Return the part of the next step that an arrival waits at most, of a step without
        online rows and of one with online decodes; 1 where it waits for the whole."""
        if self.safepoints is None or self.suspends:
            return 1.0, 1.0
        share = self.safepoints.arrival_wait_share(now_s, may_prefill=may_prefill)
        return share, share if self.safepoints.resumption is not None else 1.0

    def needs_results(self, batch: ScheduleBatch | None, terms: StepTerms | None) -> bool:
        """Return whether the last batch's results are to be taken before this batch runs: what
        is rolled back must not depend on results to come."""
        return (
            batch is not None
            and terms is not None
            and bool(self._scheduler.result_queue)
            and self.safepoints is not None
            and _has_offline(batch)
            and (terms.until_s is not None or not self.suspends)
            and self.safepoints.why_not(batch, terms.began_s) is None
        )

    # --- A step --------------------------------------------------------------------------

    def run(self, batch: ScheduleBatch, terms: StepTerms | None, forward: Forward) -> Any:
        """Run a batch with ``forward``; without ``terms`` it runs to its end.

        Returns its result. If it ends early, that is ``PREEMPTED``, or what its online rows
        came to.
        """
        self.counted_penalties.put_back(batch)
        safepoints = self.safepoints
        if safepoints is None or terms is None or not _has_offline(batch):
            return forward(batch)
        if self.suspends:
            if terms.until_s is None:
                return forward(batch)
            return self._run_alone(safepoints, batch, terms, forward)
        why_not = safepoints.why_not(batch, terms.began_s)
        if why_not is not None:
            safepoints.stats.kept[why_not] += 1
            return forward(batch)
        forward_count = self._scheduler.forward_ct
        try:
            with safepoints.armed(batch, forward_count, terms.model, terms.arrival_wait_s) as armed:
                result = forward(batch)
        except ForwardPreempted as preempted:
            return self._end_early(safepoints, batch, armed, preempted, terms, forward)
        safepoints.completed(armed)
        return result

    def _run_alone(
        self, safepoints: Safepoints, batch: ScheduleBatch, terms: StepTerms, forward: Forward
    ) -> Any:
        """Run a step of the offline lane, or what is left of it; it may be suspended."""
        resumption, lane, until_s = safepoints.resumption, self.lane, terms.until_s
        assert resumption is not None
        assert lane is not None
        assert until_s is not None
        layer, outputs = lane.start(batch)
        if layer == 0 and (why_not := safepoints.why_it_must_end(batch)) is not None:
            safepoints.stats.kept[why_not] += 1
            return forward(batch)
        self._counts["resumed"] += layer > 0
        try:
            with (
                resumption.resuming(layer, outputs),
                safepoints.stoppable(self._scheduler.forward_ct, until_s),
            ):
                return forward(batch)
        except ForwardPreempted as stop:
            if stop.layer > layer:
                layer, outputs = stop.layer, resumption.outputs
            lane.stopped(batch, layer, outputs)
            terms.suspended()
            self._counts["suspended"] += 1
            return PREEMPTED

    def _end_early(
        self,
        safepoints: Safepoints,
        batch: ScheduleBatch,
        armed: ArmedBatch,
        preempted: ForwardPreempted,
        terms: StepTerms,
        forward: Forward,
    ) -> Any:
        """Roll an aborted batch back, or its offline rows alone: then the others go on now."""
        aborted_s = time.perf_counter()
        order_behind_pass(self._scheduler)
        resumption = safepoints.resumption if armed.shrinks else None
        if resumption is None or not resumption.can_resume(len(batch.input_ids)):
            terms.gave_up([req.rid for req in batch.reqs], None)
            self._roll_back(batch, armed.kind)
            safepoints.aborted(armed, preempted, aborted_s, self._clock.now_s())
            return PREEMPTED
        offline, tokens = split_prepared(batch, armed.kind, is_offline)
        terms.gave_up(armed.offline_rids, batch)
        self._roll_back_offline(offline)
        safepoints.aborted(armed, preempted, aborted_s, self._clock.now_s(), shrunk=True)
        with resumption.skipping(preempted.layer, tokens):
            return forward(batch)

    def _roll_back(self, batch: ScheduleBatch, kind: BatchKind) -> None:
        """Put the rows of an aborted batch back to where the next pass finds them."""
        rows = roll_back(batch, kind, self._view.chunk, self._scheduler.future_map)
        self.counted_penalties.keep(batch)
        if kind is not BatchKind.DECODE:
            self._view.put_chunk(rows.unfinished)
        if kind is BatchKind.MIXED:
            self._view.put_running(batch)
        self._view.wait_again(rows.released)

    def _roll_back_offline(self, batch: ScheduleBatch) -> None:
        """Put the offline rows of a batch whose online rows go on to where a plan finds them:
        decodes are paused, and an unfinished prefill may be parked."""
        view = self._view
        kind = kind_of(batch)
        assert kind is not None
        rows = roll_back(batch, kind, view.chunk, self._scheduler.future_map)
        batch.filter_batch()  # Rows may have ended in the step before.
        view.aside.hold(batch)
        self._events["paused"] += len(batch.reqs)
        if view.chunk in rows.released:
            view.put_chunk(None)
        if rows.unfinished is not None:
            if view.chunk is None:
                view.put_chunk(rows.unfinished)
            elif view.chunk is not rows.unfinished:  # SGLang knows only one.
                view.aside.park(rows.unfinished)
                self._events["parked"] += 1
        view.wait_again(rows.released)

    # --- After a step --------------------------------------------------------------------

    def processed(self, reqs: Iterable[Req]) -> None:
        """Note who got a first token."""
        if self.safepoints is not None:
            self.safepoints.stats.results(reqs, time.perf_counter())

    def forget(self, rid: str) -> None:
        """Drop what is kept of a request that has ended."""
        self.counted_penalties.forget(rid)
        if self.safepoints is not None:
            self.safepoints.forget(rid)

    def state(self) -> dict[str, Any]:
        """Return the state of the safepoints in plain values, if some were asked for."""
        if self.safepoints is not None:
            counts = {name: self._counts[name] for name in ("suspended", "resumed")}
            return {"safepoints": {**self.safepoints.report(), **counts}}
        if self.why_no_safepoints is not None:
            return {"safepoints": {"enabled": False, "reason": self.why_no_safepoints}}
        return {}


def _has_offline(batch: ScheduleBatch) -> bool:
    return any(is_offline(req) for req in batch.reqs)
