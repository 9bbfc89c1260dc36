"""Decides which lane (``Lane``) the next step belongs to, and how long it may run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from sglang_coserve.core.bottleneck import fixed_s
from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.snapshot import EngineSnapshot, RequestInfo
from sglang_coserve.core.step_stats import StepStats

_PATIENCE_S: Final = 1.0
"""Seconds that a suspended step waits for its next part while only streams run."""


def offline_left_s(batch: StepBuilder) -> float | None:
    """Return how long a step of the offline lane may run now; None if online work is next.

    Online prompts are computed at once. Decodes leave time only to a suspended step, for as long
    as offline work may delay them, without a TPOT target to its end: a new one runs beside them.

    ``batch`` is an empty one of the shared lane.
    """
    if batch.has_online_prompts:
        return None
    if not batch.online_decodes:
        return math.inf
    if batch.snapshot.suspended is None:
        return None
    left_s = _left_s(batch, batch.slack_s)
    return left_s if left_s > 0 else None


def is_stuck(batch: StepBuilder) -> bool:
    """Return whether the suspended step cannot reach its next safepoint between two decodes.

    This happens when it began with fewer online decodes, or when offline work could add more.
    """
    target_s = batch.least_tpot_s(batch.targets.token_s or math.inf)
    return not reaches_safepoint(batch, _left_s(batch, target_s))


def waits_in_vain(batch: StepBuilder) -> bool:
    """Return whether the suspended step, which cannot be resumed now, is to be dropped.

    Streams that never pause would keep it for minutes, with its requests. The requests lose what
    the step has computed of them, and go on beside the streams. Online prompts come first, so the
    step waits for their end.
    """
    seen = batch.snapshot
    assert seen.suspended is not None
    return not batch.has_online_prompts and seen.now_s - seen.suspended.since_s > _PATIENCE_S


def stop_share(batch: StepStats, seen: EngineSnapshot) -> float:
    """Return the largest share of an offline-lane step that runs until it can be suspended.

    1 if it cannot be suspended.
    """
    return seen.stop_share if batch.prefill_requests or seen.decodes_stop else 1.0


def reaches_safepoint(batch: StepBuilder, left_s: float) -> bool:
    """Return whether the suspended step, resumed, reaches a safepoint within ``left_s``."""
    seen = batch.snapshot
    assert seen.suspended is not None
    step = seen.suspended.batch
    share = min(stop_share(step, seen), 1 - seen.suspended.done_share)
    part_s = share * batch.model.predict(step)
    return not step.is_empty and batch.context.resume_s + part_s <= left_s


def longest_s(batch: StepBuilder) -> float:
    """Return the longest time that an offline-lane step may take between two safepoints.

    An arriving request waits only for the next safepoint, not for the end of the step. The time
    must also fit between two decodes, because a step that begins while no online request decodes
    may have to go on between the decodes of requests that arrive later.
    """
    gap_s = math.inf
    if batch.targets.token_s is not None:
        gap_s = batch.targets.token_s - fixed_s(batch.model) - batch.context.resume_s
    return min(max(gap_s, 0.0), batch.context.allowance.arrival_s)


def is_late_behind(
    ends_s: float,
    arrivals: Sequence[RequestInfo],
    now_s: float,
    model: LatencyModel,
    ttft_s: float | None,
) -> bool:
    """Return whether a first token would be late if a step ran to its end (ConServe, Algorithm 2).

    The prompts of the online ``arrivals`` are computed together, after the step, which is
    predicted to end at ``ends_s``, or now if that is past. True if any of them has no target,
    neither its own nor ``ttft_s``. O(arrivals).
    """
    done_s = max(ends_s, now_s) + model.predict(
        StepStats.of((each.prompt_tokens, 0) for each in arrivals)
    )
    targets_s = [each.ttft_target_s or ttft_s for each in arrivals]
    return any(
        target_s is None or done_s > each.arrival_s + target_s
        for each, target_s in zip(arrivals, targets_s, strict=True)
    )


def _left_s(batch: StepBuilder, slack_s: float) -> float:
    return max(slack_s * batch.context.timely - batch.decodes_s, 0.0)
