"""The planned scheduler with safepoints: what arrives online may abort the batch in flight."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

from sglang.srt.managers.utils import GenerationBatchResult

from sglang_coserve.core.snapshot import EngineSnapshot
from sglang_coserve.srt.planned_scheduler import PlannedScheduler
from sglang_coserve.srt.request_marks import is_offline
from sglang_coserve.srt.safepoint.counted_penalties import CountedPenalties
from sglang_coserve.srt.safepoint.in_flight import BatchKind, kind_of
from sglang_coserve.srt.safepoint.install import install_safepoints
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted
from sglang_coserve.srt.safepoint.prepared_rows import split_prepared
from sglang_coserve.srt.safepoint.rollback import roll_back
from sglang_coserve.srt.safepoint.run_ahead import order_behind_pass
from sglang_coserve.srt.safepoint.safepoints import ArmedBatch

__all__ = ["PREEMPTED", "PreemptiveScheduler"]

Req = Any
ScheduleBatch = Any

PREEMPTED: Final = GenerationBatchResult()
"""The result of a batch that was aborted and rolled back as a whole: nothing."""


class PreemptiveScheduler(PlannedScheduler):
    """See the module's docstring. Where batches cannot be aborted it is the planned scheduler."""

    # State of SGLang's that is assigned here too.
    recv_from_tokenizer: Any
    idle_sleeper: Any
    running_batch: ScheduleBatch

    # --- Set-up --------------------------------------------------------------------------

    def init_running_status(self) -> None:
        """Set up what outlasts an aborted batch."""
        super().init_running_status()
        self._counted_penalties = CountedPenalties()

    def init_request_receiver(self) -> None:
        """Put safepoints into the model, and let a thread receive what comes meanwhile."""
        installed = install_safepoints(self, self._coserve_config)
        self._safepoints, self._ingress, self._no_safepoints = installed
        if self._ingress is not None:
            self.recv_from_tokenizer = self._ingress.inbox
            self.idle_sleeper = self._ingress.parking
        super().init_request_receiver()

    def run_event_loop(self) -> None:
        """Receive requests as long as the event loop runs."""
        with nullcontext() if self._ingress is None else self._ingress.running():
            super().run_event_loop()

    # --- Batches run, or not -------------------------------------------------------------

    def run_batch(self, batch: ScheduleBatch, pp_proxy_tensors: Any = None) -> Any:
        """Run a batch. If it is aborted, return ``PREEMPTED``, or what its online rows came to."""
        self._counted_penalties.put_back(batch)
        safepoints = self._safepoints
        if safepoints is None or not _has_offline(batch):
            return super().run_batch(batch, pp_proxy_tensors)
        why_not = safepoints.why_not(batch, self._pass_s)
        if why_not is not None:
            safepoints.stats.kept[why_not] += 1
            return super().run_batch(batch, pp_proxy_tensors)
        try:
            with safepoints.armed(
                batch, self.forward_ct, self._core.model, self._arrival_wait_s
            ) as armed:
                result = super().run_batch(batch, pp_proxy_tensors)
        except ForwardPreempted as preempted:
            return self._end_early(batch, armed, preempted)
        safepoints.completed(armed)
        return result

    def _end_early(
        self, batch: ScheduleBatch, armed: ArmedBatch, preempted: ForwardPreempted
    ) -> Any:
        """Roll an aborted batch back, or its offline rows alone: then the others go on now."""
        aborted_s = time.perf_counter()
        order_behind_pass(self)
        safepoints = self._safepoints
        assert safepoints is not None
        resumption = safepoints.resumption if armed.shrinks else None
        if resumption is None or not resumption.can_resume(len(batch.input_ids)):
            self._steps.gave_up([req.rid for req in batch.reqs], None)
            self._roll_back(batch, armed.kind)
            safepoints.aborted(armed, preempted, aborted_s, self._now_s())
            return PREEMPTED
        offline, tokens = split_prepared(batch, armed.kind, is_offline)
        self._steps.gave_up(armed.offline_rids, batch)
        self._roll_back_offline(offline)
        safepoints.aborted(armed, preempted, aborted_s, self._now_s(), shrunk=True)
        with resumption.skipping(preempted.layer, tokens):
            return super().run_batch(batch)

    def _roll_back(self, batch: ScheduleBatch, kind: BatchKind) -> None:
        """Put the rows of an aborted batch back to where the next pass finds them."""
        rows = roll_back(batch, kind, self.chunked_req, self.future_map)
        self._counted_penalties.keep(batch)
        if kind is not BatchKind.DECODE:
            self.chunked_req = rows.unfinished
        if kind is BatchKind.MIXED:
            self.running_batch = batch
        self._wait_again(rows.released)
        # The prefills' turn is not over.
        self._has_left_decodes = False

    def _roll_back_offline(self, batch: ScheduleBatch) -> None:
        """Put the offline rows of a batch whose online rows go on to where a plan finds them:
        decodes are paused, and an unfinished prefill may be parked."""
        kind = kind_of(batch)
        assert kind is not None
        rows = roll_back(batch, kind, self.chunked_req, self.future_map)
        batch.filter_batch()  # Rows may have ended in the step before.
        self._aside.hold(batch)
        self._offline_counts["paused"] += len(batch.reqs)
        if self.chunked_req in rows.released:
            self.chunked_req = None
        if rows.unfinished is not None:
            if self.chunked_req is None:
                self.chunked_req = rows.unfinished
            elif self.chunked_req is not rows.unfinished:  # SGLang knows only one.
                self._aside.park(rows.unfinished)
                self._offline_counts["parked"] += 1
        self._wait_again(rows.released)

    def _wait_again(self, released: Sequence[Req]) -> None:
        """Queue prefills that were given back; there is room in the running batch now."""
        self.running_batch.batch_is_full = False
        first = [req for req in released if not self._is_ours(req)]
        self.waiting_queue = [*first, *self.waiting_queue]
        for req in released:
            if self._is_ours(req):
                self._add_request_to_queue(req, is_retracted=True)

    @staticmethod
    def _is_ours(req: Req) -> bool:
        """False for a request that waits in SGLang's queue: online, or to fail."""
        return is_offline(req) and req.to_finish is None

    def is_disable_overlap_for_batch(
        self, batch: ScheduleBatch | None, last_batch: ScheduleBatch | None
    ) -> bool:
        """Take the last batch's results before one that may be aborted runs: what is rolled
        back must not depend on results to come."""
        if batch is not None and self.result_queue and self._may_be_aborted(batch):
            return True
        return bool(super().is_disable_overlap_for_batch(batch, last_batch))

    def _may_be_aborted(self, batch: ScheduleBatch) -> bool:
        safepoints = self._safepoints
        if safepoints is None or not _has_offline(batch):
            return False
        return safepoints.why_not(batch, self._pass_s) is None

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        """Note who got a first token; an aborted batch has no results."""
        if result is PREEMPTED:
            self._steps.processed((), ())
            return
        super().process_batch_result(batch, result)
        if self._safepoints is not None:
            self._safepoints.stats.results(batch.reqs, time.perf_counter())

    # --- Around it -----------------------------------------------------------------------

    def _snapshot(self, running_batch: ScheduleBatch, now_s: float) -> EngineSnapshot:
        snapshot = super()._snapshot(running_batch, now_s)
        if self._safepoints is None:
            return snapshot
        share = self._safepoints.arrival_wait_share(
            now_s,
            may_prefill=bool(
                self._offline_reqs or self.waiting_queue or self._aside.parked or self.chunked_req
            ),
        )
        shrinks = self._safepoints.resumption is not None
        return replace(
            snapshot,
            arrival_wait_share=share,
            mixed_arrival_wait_share=share if shrinks else 1.0,
        )

    def _forget(self, rid: str) -> None:
        super()._forget(rid)
        self._counted_penalties.forget(rid)
        if self._safepoints is not None:
            self._safepoints.forget(rid)

    def _state(self) -> dict[str, Any]:
        if self._safepoints is None:
            report: dict[str, Any] = {"enabled": False, "reason": self._no_safepoints}
        else:
            report = self._safepoints.report()
        return {**super()._state(), "safepoints": report}


def _has_offline(batch: ScheduleBatch) -> bool:
    return any(is_offline(req) for req in batch.reqs)
