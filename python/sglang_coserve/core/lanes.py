"""Which lane runs next, and until when (``Lane``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sglang_coserve.core.batch_builder import BatchBuilder
from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.bottleneck import fixed_s
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import EngineSnapshot, Row
from sglang_coserve.metrics import SloTargets

__all__ = [
    "gets_anywhere",
    "is_stuck",
    "longest_s",
    "offline_until_s",
    "seen_alone",
    "share_beside",
    "share_in_lane",
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
    left_s = _left_s(batch, batch.offline_slack_s, gap_share, margin)
    return seen.now_s + left_s if 0 < left_s < math.inf else None


def is_stuck(batch: BatchBuilder, gap_share: float, margin: float) -> bool:
    """Tell whether the suspended step does not even reach a safepoint between two decodes.

    It began when there were fewer of them, or when more of the time between them was allowed.
    """
    seen, target_s = batch.snapshot, batch.targets.tpot_s
    if seen.suspended is None or target_s is None:
        return False
    whole_s = batch.model.predict(seen.suspended.batch)
    left_s = _left_s(batch, target_s, gap_share, margin)
    return not gets_anywhere(seen.suspended.batch, whole_s, seen, left_s)


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


def share_in_lane(mixed: BatchBuilder, left_s: float, alone: BatchBuilder | None = None) -> float:
    """Return how much of the time gets offline work done in a lane of its own.

    A step there takes any time, for it is suspended for each step of the online decodes: what
    it pays are those, the resumptions, and the time before the decodes that is too short for
    another group of layers.

    Args:
        mixed: The step beside online decodes; its online half is enough.
        left_s: Time that a step of the offline lane may run before them.
        alone: That step; None for one that stops whenever it has to, and in which nothing is lost.
    """
    seen = mixed.snapshot
    decodes_s = mixed.model.predict(_decodes(mixed.online_decodes))
    run_s = left_s - seen.resume_s
    if alone is not None:
        group_s = stop_share(alone.stats, seen) * alone.predicted_s
        run_s = run_s // group_s * group_s
    share = max(run_s, 0.0) / (decodes_s + left_s)
    if alone is None:
        return share
    return share * _work_s(mixed, alone.stats) / alone.predicted_s


def share_beside(mixed: BatchBuilder, least_tokens: int, *, has_prompts: bool) -> float:
    """Return how much of the time gets offline work done in steps with online decodes.

    There it shares what a step costs however small it is, but the whole step has to end before
    its decodes, or an arrival, have waited too long. Judged is the better of two: a step with
    all offline decodes, as it is planned, and one without them. After steps in the offline lane
    there are so many that they leave no time for prompts, but that does not stay so.

    Args:
        mixed: The step as it is planned; its online half is enough.
        least_tokens: Of a chunk.
        has_prompts: Offline prompts wait.
    """
    model, budget_s = mixed.model, mixed.offline_budget_s
    shares = [0.0]
    for riders in [mixed.offline_decodes, []] if mixed.offline_decodes else [[]]:
        offline, stats = _decodes(riders), _decodes([*mixed.online_decodes, *riders])
        if model.predict(stats) > budget_s:
            continue
        if has_prompts:
            free_tokens = mixed.snapshot.max_batch_tokens - stats.compute_tokens
            tokens = model.max_prefill_tokens(stats, 0, max(free_tokens, 0), budget_s)
            if tokens >= least_tokens:
                offline, stats = offline.with_prefill(tokens, 0), stats.with_prefill(tokens, 0)
        shares.append(_work_s(mixed, offline) / model.predict(stats))
    return max(shares)


def _work_s(batch: BatchBuilder, offline: BatchStats) -> float:
    """Return the time that offline work takes in a step full of such work.

    So neither counts what every step takes, nor what decodes read while prompts compute. To
    read the context of a prompt is no work of its own: with longer chunks it is read less often.
    """
    if offline.is_empty:
        return 0.0
    times = max(batch.snapshot.max_batch_tokens // offline.compute_tokens, 1)
    full = BatchStats(*(times * part for part in offline._replace(prefill_context_tokens=0)))
    return batch.model.predict(full) / times


def _left_s(batch: BatchBuilder, slack_s: float, gap_share: float, margin: float) -> float:
    decodes_s = batch.model.predict(_decodes(batch.online_decodes))
    return gap_share * (slack_s - decodes_s) * (1 - margin)


def _decodes(rows: Sequence[Row]) -> BatchStats:
    keys = len(rows) + sum([row.computed_tokens for row in rows])
    return BatchStats(decode_requests=len(rows), decode_context_tokens=keys)
