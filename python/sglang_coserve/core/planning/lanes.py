"""Decides which lane (``Lane``) the next step belongs to, and until when it may run."""

from __future__ import annotations

import math

from sglang_coserve.core.bottleneck import fixed_s
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.planning.plan_context import PlanContext
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.snapshot import EngineSnapshot
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.metrics import SloTargets

__all__ = [
    "is_stuck",
    "longest_s",
    "offline_until_s",
    "reaches_safepoint",
    "stop_share",
]


def offline_until_s(batch: StepBuilder, context: PlanContext) -> float | None:
    """Return until when a step of the offline lane may run now; None if online work is next.

    Online prompts are computed at once. Decodes leave time only to a suspended step, for as long
    as offline work may delay them: a new one runs beside them. Without a TPOT target they
    would wait forever, as one offline step would follow the other, so then the decodes are next.

    Args:
        batch: An empty batch of the shared lane.
        context: What offline work may add.
    """
    seen = batch.snapshot
    if batch.requests.has_online_prompts:
        return None
    if not batch.requests.online_decodes:
        return math.inf
    if seen.suspended is None:
        return None
    left_s = _left_s(batch, context, batch.deadlines.slack_s)
    return seen.begins_s + left_s if 0 < left_s < math.inf else None


def is_stuck(batch: StepBuilder, context: PlanContext) -> bool:
    """Return whether the suspended step cannot reach its next safepoint between two decodes.

    This happens when it began with fewer online decodes, or when offline work could add more.
    """
    seen, target_s = batch.snapshot, batch.targets.tpot_s
    if seen.suspended is None or target_s is None:
        return False
    whole_s = batch.model.predict(seen.suspended.batch)
    left_s = _left_s(batch, context, target_s)
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


def _left_s(batch: StepBuilder, context: PlanContext, slack_s: float) -> float:
    decodes_s = batch.model.predict(batch.requests.online_decode_stats)
    return context.gap_s(slack_s * context.timely - decodes_s)
