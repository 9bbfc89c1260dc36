"""Which lane runs next, and until when (``Lane``)."""

from __future__ import annotations

import math
from dataclasses import replace

from sglang_coserve.core.batch_builder import BatchBuilder
from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.bottleneck import fixed_s
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import EngineSnapshot
from sglang_coserve.metrics import SloTargets

__all__ = [
    "gets_anywhere",
    "is_sliced_better",
    "longest_s",
    "offline_until_s",
    "seen_alone",
    "stop_share",
]


def offline_until_s(batch: BatchBuilder, gap_share: float, margin: float) -> float | None:
    """Return until when a step of the offline lane may run now; None: online work is next.

    An online prompt is computed at once. A decode can wait until its token is due, less
    the time of its step. Where nothing is promised it would wait for ever, for one offline
    step would follow the other; so there it is next.

    Args:
        batch: Of the shared lane, with nothing in it.
        gap_share: Part of what the decodes leave until a token is late that offline work may take.
        margin: Part of the time that is left free for prediction error.
    """
    seen = batch.snapshot
    if batch.online_prefills or seen.waiting:
        return None
    if not batch.online_decodes:
        return math.inf
    left_s = gap_share * (batch.tpot_slack_s - _online_decodes_s(batch)) * (1 - margin)
    return seen.now_s + left_s if 0 < left_s < math.inf else None


def stop_share(batch: BatchStats, seen: EngineSnapshot) -> float:
    """Return the part of such a step of the offline lane that passes at most until it stops."""
    return seen.stop_share if batch.prefill_requests or seen.decodes_stop else 1.0


def gets_anywhere(
    batch: BatchStats, predicted_s: float, seen: EngineSnapshot, left_s: float
) -> bool:
    """Tell whether a step of the offline lane reaches a safepoint within ``left_s``.

    Args:
        batch: Of the step.
        predicted_s: Of the whole step.
        seen: The engine; the step may be the one that is suspended.
        left_s: Time that it may run.
    """
    done_share = 0.0 if seen.suspended is None else seen.suspended.done_share
    share = min(stop_share(batch, seen), 1 - done_share)
    return not batch.is_empty and seen.resume_s + share * predicted_s <= left_s


def longest_s(
    model: LatencyModel, targets: SloTargets, arrival_wait_s: float, seen: EngineSnapshot
) -> float:
    """Return the longest time that a step of the offline lane may take from one stop to the next.

    An arrival waits for it, not for the step's end, and it fits between two decodes: a step
    that is begun while nobody decodes goes on beside those who come.
    """
    gap_s = math.inf
    if targets.tpot_s is not None:
        gap_s = max(targets.tpot_s - fixed_s(model) - seen.resume_s, 0.0)
    return min(gap_s, arrival_wait_s)


def seen_alone(seen: EngineSnapshot, headroom_tokens: int) -> EngineSnapshot:
    """Return the engine as a step of the offline lane sees it. O(rows).

    Online rows keep ``headroom_tokens`` of KV each, to go on while the step is suspended.
    Where they decode, an offline row that decodes with them leaves them only if it can pause.
    """
    num_online = sum([row.info.is_online for row in seen.rows])
    rows = [
        row
        for row in seen.rows
        if not row.info.is_online
        and (not num_online or row.info.can_pause or row.state is not RequestState.DECODING)
    ]
    kept_tokens = headroom_tokens * num_online
    from_free = min(kept_tokens, seen.free_kv_tokens)
    return replace(
        seen,
        rows=rows,
        waiting=(),
        free_kv_tokens=seen.free_kv_tokens - from_free,
        evictable_kv_tokens=max(seen.evictable_kv_tokens - (kept_tokens - from_free), 0),
        free_window_tokens=max(seen.free_window_tokens - kept_tokens, 0),
    )


def is_sliced_better(mixed: BatchBuilder, alone: BatchBuilder) -> bool:
    """Tell whether offline work gets on faster in a lane of its own than beside online decodes.

    Beside them it shares what a step costs however small it is, but the whole step has to
    end before its decodes, or an arrival, have waited too long. Alone a step takes any time,
    for it is suspended for each step of the decodes: what it pays are those and the
    resumptions. Compared is the share of time with work that only offline requests need.
    """
    seen, model = mixed.snapshot, mixed.model
    decodes_s = _online_decodes_s(mixed)
    free_share = 1 - (decodes_s + seen.resume_s) / mixed.tpot_slack_s
    alone_share = free_share * (_work_s(model, alone.stats)) / alone.predicted_s
    if mixed.stats.is_empty:
        return alone_share > 0
    rows = len(mixed.online_decodes)
    keys = rows + sum([row.computed_tokens for row in mixed.online_decodes])
    stats = mixed.stats
    beside = stats._replace(
        decode_requests=stats.decode_requests - rows,
        decode_context_tokens=stats.decode_context_tokens - keys,
    )
    return alone_share > _work_s(model, beside) / mixed.predicted_s


def _work_s(model: LatencyModel, offline: BatchStats) -> float:
    """Return the time of a batch beyond what every batch takes.

    To read the context of a prompt is no work of its own: with longer chunks it is read
    less often.
    """
    if offline.is_empty:
        return 0.0
    return max(model.predict(offline._replace(prefill_context_tokens=0)) - fixed_s(model), 0.0)


def _online_decodes_s(batch: BatchBuilder) -> float:
    """Return the time of a step with the online decodes alone."""
    rows = batch.online_decodes
    keys = len(rows) + sum([row.computed_tokens for row in rows])
    return batch.model.predict(BatchStats(decode_requests=len(rows), decode_context_tokens=keys))
