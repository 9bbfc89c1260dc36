"""Decides which lane (``Lane``) the next step belongs to, and until when it may run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sglang_coserve.core.bottleneck import fixed_s
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import EngineSnapshot, Request
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.metrics import SloTargets

__all__ = [
    "is_stuck",
    "longest_s",
    "mixed_share",
    "offline_lane_view",
    "offline_until_s",
    "reaches_safepoint",
    "share_in_lane",
    "stop_share",
]


def offline_until_s(batch: StepBuilder, gap_share: float, margin: float) -> float | None:
    """Return until when a step of the offline lane may run now; None if online work is next.

    Online prompts are computed at once. Decodes can wait until their token is due, less the
    time of their own step. Without a TPOT target they would wait forever, as one offline step
    would follow the other, so then the decodes are next.

    Args:
        batch: An empty batch of the shared lane.
        gap_share: Share of the decodes' slack that offline work may use.
        margin: Share of the time that is left free for prediction error.
    """
    seen = batch.snapshot
    if batch.requests.online_prefills or seen.waiting:
        return None
    if not batch.requests.online_decodes:
        return math.inf
    left_s = _left_s(batch, batch.deadlines.offline_slack_s, gap_share, margin)
    return seen.now_s + left_s if 0 < left_s < math.inf else None


def is_stuck(batch: StepBuilder, gap_share: float, margin: float) -> bool:
    """Return whether the suspended step cannot reach its next safepoint between two decodes.

    This happens when it began with fewer online decodes, or with a larger ``gap_share``.
    """
    seen, target_s = batch.snapshot, batch.targets.tpot_s
    if seen.suspended is None or target_s is None:
        return False
    whole_s = batch.model.predict(seen.suspended.batch)
    left_s = _left_s(batch, target_s, gap_share, margin)
    return not reaches_safepoint(seen.suspended.batch, whole_s, seen, left_s)


def stop_share(batch: StepStats, seen: EngineSnapshot) -> float:
    """Return the largest share of an offline-lane step that runs until it can be suspended.

    1 if it cannot be suspended.
    """
    return seen.stop_share if batch.prefill_requests or seen.decodes_stop else 1.0


def reaches_safepoint(
    batch: StepStats, predicted_s: float, seen: EngineSnapshot, left_s: float
) -> bool:
    """Return whether a step of the offline lane reaches a safepoint within ``left_s``.

    Args:
        batch: The sums over the step's batch.
        predicted_s: Predicted time of the whole step.
        seen: The engine; if it has a suspended step, it is that one.
        left_s: Time that the step may run.
    """
    done_share = 0.0 if seen.suspended is None else seen.suspended.done_share
    share = min(stop_share(batch, seen), 1 - done_share)
    return not batch.is_empty and seen.resume_s + share * predicted_s <= left_s


def longest_s(
    model: LatencyModel, targets: SloTargets, arrival_wait_s: float, seen: EngineSnapshot
) -> float:
    """Return the longest time that an offline-lane step may take between two safepoints.

    An arriving request waits only for the next safepoint, not for the end of the step. The time
    must also fit between two decodes, because a step that begins while no online request decodes
    may have to go on between the decodes of requests that arrive later.
    """
    gap_s = math.inf
    if targets.tpot_s is not None:
        gap_s = max(targets.tpot_s - fixed_s(model) - seen.resume_s, 0.0)
    return min(gap_s, arrival_wait_s)


def offline_lane_view(seen: EngineSnapshot, headroom_tokens: int) -> EngineSnapshot:
    """Return the snapshot from which a step of the offline lane is planned. O(requests).

    It has no online requests, and ``headroom_tokens`` of KV less for each online request, so that
    those can go on while the step is suspended. If there are online requests, it leaves out offline
    decodes that cannot pause: they can decode only together with the online ones.
    """
    requests = [request for request in seen.admitted if not request.info.is_online]
    num_online = len(seen.admitted) - len(requests)
    if num_online:
        decoding = RequestState.DECODING
        requests = [r for r in requests if r.info.can_pause or r.state is not decoding]
    kept_tokens = headroom_tokens * num_online
    from_free = min(kept_tokens, seen.free_kv_tokens)
    return replace(
        seen,
        admitted=requests,
        waiting=(),
        free_kv_tokens=seen.free_kv_tokens - from_free,
        evictable_kv_tokens=max(seen.evictable_kv_tokens - (kept_tokens - from_free), 0),
        free_window_tokens=max(seen.free_window_tokens - kept_tokens, 0),
    )


def share_in_lane(mixed: StepBuilder, left_s: float, alone: StepBuilder | None = None) -> float:
    """Return the share of time that does offline work if it runs in the offline lane.

    A step there may take any time, as it is suspended for each step of the online decodes. Lost
    are the times of those steps, of the resumptions, and the time before each decode that is
    too short for another group of layers.

    Args:
        mixed: The step of the shared lane; its online half is enough.
        left_s: Time that an offline-lane step may run before the online decodes.
        alone: The offline-lane step; None assumes one that can stop at any time without loss,
            which gives an upper bound.
    """
    seen = mixed.snapshot
    decodes_s = mixed.model.predict(_decodes(mixed.requests.online_decodes))
    run_s = left_s - seen.resume_s
    if alone is not None:
        group_s = stop_share(alone.work.stats, seen) * alone.work.predicted_s
        run_s = run_s // group_s * group_s
    share = max(run_s, 0.0) / (decodes_s + left_s)
    if alone is None:
        return share
    return share * _work_s(mixed, alone.work.stats) / alone.work.predicted_s


def mixed_share(
    mixed: StepBuilder, least_tokens: int, enough: float, *, has_prompts: bool
) -> float:
    """Return the share of time that does offline work if it runs in steps with online decodes.

    There it shares the fixed cost of a step, but the whole step must end before its decodes, or
    an arriving request, have waited too long. The result is the better of two steps: one with
    all offline decodes, as it would be planned, and one without them. After steps in the offline
    lane there may be so many offline decodes that they leave no time for prompts, but that is
    temporary.

    Args:
        mixed: The step as planned; its online half is enough.
        least_tokens: Smallest prefill chunk.
        enough: A share that is as good as any larger one: no better step is then looked for.
        has_prompts: Whether offline prompts wait.
    """
    model, budget_s = mixed.model, mixed.offline_budget_s
    online = _decodes(mixed.requests.online_decodes)
    share = 0.0
    for riders in [mixed.requests.offline_decodes, []] if mixed.requests.offline_decodes else [[]]:
        offline = _decodes(riders)
        stats = StepStats(
            decode_requests=online.decode_requests + offline.decode_requests,
            decode_context_tokens=online.decode_context_tokens + offline.decode_context_tokens,
        )
        if model.predict(stats) > budget_s:
            continue
        if has_prompts:
            free_tokens = mixed.snapshot.max_batch_tokens - stats.compute_tokens
            tokens = model.max_prefill_tokens(stats, 0, max(free_tokens, 0), budget_s)
            if tokens >= least_tokens:
                offline, stats = offline.with_prefill(tokens, 0), stats.with_prefill(tokens, 0)
        share = max(share, _work_s(mixed, offline) / model.predict(stats))
        if share >= enough:
            break
    return share


def _work_s(batch: StepBuilder, offline: StepStats) -> float:
    """Return the time that offline work would take as its part of a step full of such work.

    This amortizes the fixed cost of a step, and lets decodes read memory while prompts compute.
    Reading the context of a prompt does not count as work: longer chunks read it less often.
    """
    if offline.is_empty:
        return 0.0
    times = max(batch.snapshot.max_batch_tokens // offline.compute_tokens, 1)
    full = StepStats(
        prefill_requests=times * offline.prefill_requests,
        prefill_tokens=times * offline.prefill_tokens,
        prefill_attention_pairs=times * offline.prefill_attention_pairs,
        decode_requests=times * offline.decode_requests,
        decode_context_tokens=times * offline.decode_context_tokens,
    )
    return batch.model.predict(full) / times


def _left_s(batch: StepBuilder, slack_s: float, gap_share: float, margin: float) -> float:
    decodes_s = batch.model.predict(_decodes(batch.requests.online_decodes))
    return gap_share * (slack_s - decodes_s) * (1 - margin)


def _decodes(requests: Sequence[Request]) -> StepStats:
    keys = len(requests) + sum([request.computed_tokens for request in requests])
    return StepStats(decode_requests=len(requests), decode_context_tokens=keys)
