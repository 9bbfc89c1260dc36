"""Who gives way to online work: rows their KV, and the batch in flight the GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from sglang_coserve.core.batch_builder import BatchBuilder
from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import Row

__all__ = ["Decision", "Reason", "decide", "last_admitted_first", "wasted_s", "yields_first"]

_RANK = {
    RequestState.PARKED: 0,
    RequestState.PAUSED: 1,
    RequestState.PREFILLING: 2,
    RequestState.DECODING: 2,
}


def yields_first(row: Row) -> int:
    """Return how readily a row is evicted: parked (0), then paused (1), then running (2)."""
    return _RANK[row.state]


def last_admitted_first(batch: BatchBuilder) -> Sequence[Row]:
    """Return the offline rows in the order of eviction: parked, paused, running.

    Of equals the last admitted goes first: the oldest are closest to their end.
    O(rows log rows), and only called when KV is short.
    """
    rows = batch.offline_rows
    admitted = {row.info.rid: place for place, row in enumerate(batch.snapshot.rows)}
    return sorted(rows, key=lambda row: (yields_first(row), -admitted[row.info.rid]))


class Reason(Enum):
    """Why a batch in flight is aborted or not."""

    NO_OFFLINE_WORK = "no offline work in flight"
    NO_TARGET = "no TTFT target"
    IN_TIME = "the first token is predicted in time"
    LATE = "waiting for the batch would miss the TTFT target"
    LONG_WAIT = "the batch takes longer than an arrival may wait"
    LATE_ANYWAY = "the TTFT target is missed either way, and the batch is nearly done"


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to abort the offline part of the batch in flight at its next safepoint."""

    abort: bool
    reason: Reason
    first_token_s: float
    """Predicted wait for the first token from now on, if the batch is not aborted."""


def decide(
    model: LatencyModel,
    in_flight: BatchStats,
    in_flight_online: BatchStats,
    elapsed_s: float,
    arrived: BatchStats,
    ttft_left_s: float | None,
    *,
    arrival_wait_s: float = math.inf,
    safepoint_s: float = 0.0,
    restarts_online: bool = False,
) -> Decision:
    """Decide on the batch in flight when online requests arrive (ConServe Algorithm 2, A.1).

    Args:
        model: the latency model.
        in_flight: the batch that runs.
        in_flight_online: its online part, which goes on if the rest is aborted.
        elapsed_s: time since it started.
        arrived: the prefills of the online requests that wait, together.
        ttft_left_s: time left until the first of them misses its TTFT target; ``None`` without
            a target.
        arrival_wait_s: longest time that an arrival may wait for a batch in flight
            (``StepPlan.arrival_wait_s``).
        safepoint_s: time until the next safepoint notices an abort, and the rows are cleaned up.
        restarts_online: the online part starts over after an abort, instead of going on.

    The algorithm aborts whenever remaining + prefill exceeds the target. That is
    late: an arrival that just makes its own target delays those behind it. So a
    batch is also aborted when it would keep an arrival waiting for longer than the
    scheduler has planned with. And an abort must bring the first token forward: a
    batch that is nearly done is not thrown away for nothing. O(1).
    """
    if in_flight == in_flight_online:
        return Decision(False, Reason.NO_OFFLINE_WORK, math.inf)
    prefill_s = model.predict(arrived)
    remaining_s = max(model.predict(in_flight) - elapsed_s, 0.0)
    first_token_s = remaining_s + prefill_s
    if ttft_left_s is None:
        return Decision(False, Reason.NO_TARGET, first_token_s)
    is_late = first_token_s > ttft_left_s
    if not is_late and remaining_s <= arrival_wait_s:
        return Decision(False, Reason.IN_TIME, first_token_s)
    online_s = model.predict(in_flight_online)
    if not restarts_online:
        # It goes through the layers that are left: its share of what remains.
        whole_s = model.predict(in_flight)
        online_s *= remaining_s / whole_s if whole_s else 0.0
    if safepoint_s + online_s >= remaining_s:
        return Decision(False, Reason.LATE_ANYWAY, first_token_s)
    return Decision(True, Reason.LATE if is_late else Reason.LONG_WAIT, first_token_s)


def wasted_s(in_flight: BatchStats, in_flight_online: BatchStats, elapsed_s: float) -> float:
    """Return the part of an iteration's time that is lost when its offline part is aborted.

    By tokens, not by a latency model: tensor-parallel ranks must all say the same.
    """
    offline_tokens = in_flight.compute_tokens - in_flight_online.compute_tokens
    return elapsed_s * offline_tokens / in_flight.compute_tokens
