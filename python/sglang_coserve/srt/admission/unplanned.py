"""Serves the passes whose plan could not be made or carried out.

A plan advises SGLang, and must not end it. When one raises, the places of all requests are put in
order, what it was made from is written down, and SGLang's own pass is run instead, with online
requests first. Waiting and paused offline requests stay as they are for that pass. Where plans fail
again and again, or fail when SGLang has prepared a batch already, so that the core does not know
what runs, there are no more plans until the next start: offline requests are then served as the
policy fifo serves them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from sglang.srt.managers.scheduler import NextBatchPlan

from sglang_coserve.core.advisory import Advisory
from sglang_coserve.srt.admission.fifo_pass import FifoPass
from sglang_coserve.srt.steps.engine_view import EngineView
from sglang_coserve.srt.steps.offline_lane import OfflineLane
from sglang_coserve.srt.steps.offline_retraction import OfflineRetraction, Prefill
from sglang_coserve.srt.steps.request_ledger import RequestLedger

__all__ = ["NotedPass", "UnplannedPasses"]

Req = Any
ScheduleBatch = Any

_MOST_IN_A_ROW: Final = 8
"""Failures without a plan in between. An accident does not come back as often in a row."""

_PART: Final = "planning"
"""Its name in ``Advisory``."""

logger = logging.getLogger(__name__)


class NotedPass:
    """SGLang's pass, with a note of how far it has come."""

    def __init__(self, prefill: Prefill) -> None:
        self._prefill = prefill
        self.is_inside = False
        """Whether SGLang's own code is running, or has raised."""

        self.result: Any = None
        """What it returned last; None before it did."""

    def __call__(self, running_batch: ScheduleBatch) -> Any:
        """Run it."""
        self.is_inside = True
        self.result = self._prefill(running_batch)
        self.is_inside = False
        return self.result


class UnplannedPasses:
    """See the module's docstring."""

    def __init__(
        self,
        fifo_pass: FifoPass,
        *,
        view: EngineView,
        retraction: OfflineRetraction,
        ledger: RequestLedger,
        lane: OfflineLane | None,
        advisory: Advisory,
        write: Callable[[], None],
    ) -> None:
        """``write`` writes down what the plan that failed was made from."""
        self._fifo_pass = fifo_pass
        self._view = view
        self._retraction = retraction
        self._ledger = ledger
        self._lane = lane
        self._advisory = advisory
        self._write = write
        self._in_a_row = 0
        self.num_failed = 0
        """Plans that failed since the start."""

    @property
    def are_all(self) -> bool:
        """Whether there are no plans any more."""
        return _PART in self._advisory.off

    def planned(self) -> None:
        """Note a plan that was carried out."""
        self._in_a_row = 0

    def failed(self, error: Exception, tried: NotedPass) -> None:
        """Note a plan that failed while, or before, it had SGLang's pass ``tried``.

        Raises:
            Exception: ``error``, if it is SGLang's own: another pass would not mend that.
        """
        if tried.is_inside:
            raise error
        self.num_failed += 1
        self._in_a_row += 1
        logger.error("no plan for this pass: SGLang's own serves it", exc_info=error)
        self._advisory.tell("failed plans", self._write)
        has_batch = tried.result is not None and tried.result.batch_to_run is not None
        if has_batch or self._in_a_row >= _MOST_IN_A_ROW:
            self.end_planning(error)

    def end_planning(self, error: Exception) -> None:
        """Make no more plans, as the core no longer knows what the engine does."""
        self._advisory.switch_off(_PART, error)

    def recover(self, running_batch: ScheduleBatch, tried: NotedPass, *, is_alone: bool) -> Any:
        """Put requests in their places, and run SGLang's pass if it has not prepared a batch.

        ``is_alone`` says of a prepared batch that it is one of the offline lane, beside which
        ``running_batch`` waits. O(requests).
        """
        self._view.end_offer()
        prepared = None if tried.result is None else tried.result.batch_to_run
        if prepared is None:
            if self._lane is not None:
                self._lane.forget_launched()
            self._requeue_lost(running_batch, ())
            return self.admit(running_batch, tried)
        kept = running_batch if is_alone else tried.result.running_batch
        self._requeue_lost(kept, prepared.reqs)
        return NextBatchPlan(batch_to_run=prepared, running_batch=kept)

    def admit(self, running_batch: ScheduleBatch, prefill: Prefill) -> Any:
        """Run a pass without a plan."""
        if self.are_all:
            self._end_pauses(running_batch)
        return self._fifo_pass.admit(running_batch, prefill, takes_offline=self.are_all)

    def _end_pauses(self, running_batch: ScheduleBatch) -> None:
        """Let the requests wait that only a plan would have resumed."""
        if self._lane is not None and self._lane.suspended is not None:
            self._lane.drop()
        rids = {req.rid for req in self._view.paused_requests.reqs}
        self._retraction.retract(rids, running_batch)

    def _requeue_lost(self, running_batch: ScheduleBatch, launched: Sequence[Req]) -> None:
        """Release and requeue the requests that were on their way from one place to another."""
        placed = {id(req) for req in self._view.requests_with_kv(running_batch)}
        placed |= {id(req) for req in (*launched, *self._view.elsewhere())}
        online, offline = self._ledger.with_kv()
        for req in (*online, *offline):
            if id(req) not in placed and not req.finished():
                self._retraction.release(req)
