"""Runs prepared batches; one of the offline lane may be suspended and resumed later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from sglang.srt.managers.utils import GenerationBatchResult

from sglang_coserve.srt.safepoint.instrument import ForwardPreempted
from sglang_coserve.srt.safepoint.safepoints import Installed, Stops
from sglang_coserve.srt.steps.clocks import LaunchPacer, PartTimer
from sglang_coserve.srt.steps.offline_lane import OfflineLane

Req = Any
ScheduleBatch = Any

SUSPENDED: Final = GenerationBatchResult()
"""Result that stands for a batch that was suspended."""

Forward = Callable[[ScheduleBatch], Any]


class StepRunner:
    """Runs batches; those of the shared lane exactly as SGLang does."""

    def __init__(
        self,
        scheduler: Any,
        installed: Installed,
        lane: OfflineLane,
        timer: PartTimer | None,
        pacer: LaunchPacer | None,
    ) -> None:
        """``timer`` times what is run, if that is asked for and the host does not wait for it;
        ``pacer`` is told of it."""
        self.safepoints = installed.safepoints
        self.why_no_safepoints = installed.why_not
        self.lane = lane
        self.timer = timer
        self._pacer = pacer
        self._scheduler = scheduler

    # --- Before a step -------------------------------------------------------------------

    @property
    def stop_share(self) -> float:
        """See ``EngineSnapshot``; 1 if there is no offline lane."""
        return 1.0 if self.safepoints is None else self.safepoints.stop_share

    @property
    def decodes_stop(self) -> bool:
        """See ``EngineSnapshot``."""
        return self.safepoints is None or self.safepoints.decodes_stop

    def needs_results(self, batch: ScheduleBatch | None, stops: Stops | None) -> bool:
        """Return whether the last batch's results must be processed before this batch runs.

        A step that may be suspended, and later dropped, must not depend on pending results.
        """
        return (
            batch is not None
            and stops is not None
            and bool(self._scheduler.result_queue)
            and self.safepoints is not None
            and self.safepoints.why_it_must_end(batch) is None
        )

    # --- A step --------------------------------------------------------------------------

    def run(self, batch: ScheduleBatch, stops: Stops | None, forward: Forward) -> Any:
        """Run a batch, or the rest of a suspended one, with ``forward``.

        ``stops`` is None for one that runs to its end. Returns the result, or ``SUSPENDED``.
        """
        began_s = time.perf_counter()
        try:
            result = self._run(batch, stops, forward)
        finally:
            if self.timer is not None:
                self.timer.launched()
        if self._pacer is not None:
            self._pacer.launched(result, began_s)
        return result

    def _run(self, batch: ScheduleBatch, stops: Stops | None, forward: Forward) -> Any:
        safepoints, lane = self.safepoints, self.lane
        if stops is None or safepoints is None:
            return forward(batch)
        layer, outputs = lane.start(batch)
        if layer == 0 and (why_not := safepoints.why_it_must_end(batch)) is not None:
            safepoints.stats.ran_to_end[why_not] += 1
            return forward(batch)
        safepoints.stats.resumed += layer > 0
        resumption = safepoints.resumption
        try:
            with (
                resumption.resuming(layer, outputs),
                safepoints.armed(self._scheduler.forward_ct, stops),
            ):
                return forward(batch)
        except ForwardPreempted as stop:
            if stop.layer > layer:
                layer, outputs = stop.layer, resumption.outputs
            kind = lane.stopped(batch, layer, outputs)
            safepoints.suspended(kind, time.perf_counter())
            return SUSPENDED
        finally:
            resumption.outputs = None

    # --- After a step --------------------------------------------------------------------

    def processed(self, reqs: Iterable[Req]) -> None:
        """Record the requests of a processed batch, to measure the delay of first tokens."""
        if self.safepoints is not None:
            self.safepoints.stats.results(reqs, time.perf_counter())

    def forget(self, rid: str) -> None:
        """Remove the state of a request that has ended."""
        if self.safepoints is not None:
            self.safepoints.stats.forget(rid)

    def state(self) -> dict[str, Any]:
        """Return the state of the safepoints as plain values; empty if none were requested."""
        if self.safepoints is not None:
            return {"safepoints": self.safepoints.report()}
        if self.why_no_safepoints is not None:
            return {"safepoints": {"enabled": False, "reason": self.why_no_safepoints}}
        return {}
