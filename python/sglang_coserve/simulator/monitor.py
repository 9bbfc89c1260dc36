"""The thread beside a running batch that sees online arrivals (ConServe §4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.preemption import decide, wasted_s
from sglang_coserve.core.preemption_guard import PreemptionGuard
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.running_batch import RunningBatch

__all__ = ["Monitor"]


class Monitor:
    """Asks the core whether an arrival is reason to abort the offline part of a batch."""

    def __init__(
        self, model: LatencyModel, targets: SloTargets, guard: PreemptionGuard | None = None
    ) -> None:
        """``model`` is the scheduler's, which may differ from the executor's."""
        self._model = model
        self._targets = targets
        self._guard = guard or PreemptionGuard()

    def may_abort(self, now_s: float) -> bool:
        """Tell whether the guard lets an iteration that starts now be aborted."""
        return self._guard.may_abort(now_s)

    def ran(self, batch: RunningBatch) -> None:
        """Note that a batch is about to run to its end."""
        self._guard.completed(batch.offline_rids())

    def aborts(self, batch: RunningBatch, now_s: float, elapsed_s: float) -> None:
        """Note that the offline part of a batch, which still holds it, is aborted."""
        lost_s = wasted_s(batch.stats, batch.online_stats(), elapsed_s)
        self._guard.aborted(batch.offline_rids(), now_s, lost_s)

    def wants_abort(
        self,
        batch: RunningBatch,
        waiting: Sequence[SimRequest],
        now_s: float,
        elapsed_s: float,
        safepoint_s: float,
        arrival_wait_s: float,
    ) -> bool:
        """Decide at an online arrival, with ``safepoint_s`` to go until the next safepoint.

        It may wait for ``arrival_wait_s``, says the plan that runs.
        """
        # The online rows that decode now go on beside the prefills.
        arrived = BatchStats.of(
            ((request.row.tokens_to_compute, request.row.cached_tokens) for request in waiting),
            (r.computed_tokens + 1 for r in batch.decodes if r.info.is_online),
        )
        decision = decide(
            self._model,
            batch.stats,
            batch.online_stats(),
            elapsed_s,
            arrived,
            self._ttft_left_s(waiting, now_s),
            arrival_wait_s=arrival_wait_s,
            safepoint_s=safepoint_s,
        )
        return decision.abort

    def _ttft_left_s(self, waiting: Sequence[SimRequest], now_s: float) -> float | None:
        left_s = math.inf
        for request in waiting:
            info = request.info
            target_s = info.ttft_target_s or self._targets.ttft_s
            if target_s is not None and not request.generated_tokens:
                left_s = min(left_s, info.arrival_s + target_s - now_s)
        return None if math.isinf(left_s) else left_s
