"""Tells the core what the engine's online requests experienced, and warns of what they miss."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.allowance import Allowance
from sglang_coserve.core.baseline import Baseline
from sglang_coserve.core.interference import Interference
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.slo_monitor import SloMonitor
from sglang_coserve.core.snapshot import RequestInfo

__all__ = ["SloWatch"]

logger = logging.getLogger(__name__)

Req = Any


class SloWatch:
    """Online requests from arrival to end. Times are this process's, measured, not planned."""

    def __init__(self, config: CoserveConfig, baseline: Baseline | None, *, warns: bool) -> None:
        """``warns`` is for one of the ranks, which all see the same."""
        self.has_baseline = baseline is not None
        self._warns = warns
        self._monitor = SloMonitor(config.slo_targets(), config.slos())
        # What steers the scheduler is in the core, which is told of its own steps.
        steers_nothing = Allowance((), ttft_prior_s=1.0, gap_prior_s=1.0)
        self._interference = Interference(self._monitor, baseline, steers_nothing)

    def arrived(self, info: RequestInfo, cached_tokens: int) -> None:
        """Watch an online request from now on; ``cached_tokens`` of it need no computing."""
        self._interference.arrived(info, cached_tokens)

    def results(self, reqs: Iterable[Req], now_s: float) -> None:
        """Note that an iteration's tokens are out. O(online rows)."""
        interference = self._interference
        for req in reqs:
            if req.output_ids:
                interference.produced(req.rid, now_s)
            if req.finished():
                if req.finished_reason.to_json()["type"] == "abort":
                    # One that its client aborted says nothing about the server.
                    interference.forget(req.rid)
                else:
                    interference.finished(req.rid)
        warning = self._monitor.warning(now_s)
        if warning is not None and self._warns:
            logger.warning("%s", warning)

    def advance(self, model: LatencyModel, now_s: float) -> None:
        """Run the baseline on; every request that arrived by ``now_s`` is watched."""
        self._interference.advance(model.predict, now_s)

    def refused(self, rid: str, now_s: float) -> None:
        """Note that the server itself gave a request up."""
        self._interference.refused(rid, now_s)

    def forget(self, rid: str) -> None:
        """Stop watching a request; one that has finished is still judged."""
        self._interference.forget(rid)

    def report(self, now_s: float) -> dict[str, Any]:
        """Return the standing of every SLO, in plain values."""
        return self._monitor.report(now_s).to_dict()
