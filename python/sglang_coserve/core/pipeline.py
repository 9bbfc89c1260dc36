"""Pipeline parallelism: the duration of a step.

A pipeline of K stages has K micro-batches in flight, each one stage behind the one before it. All
advance at the pace of the slowest, so a step takes as long as the slowest of the last K would
take alone (HyGen keeps the last K steps for the same reason, appendix A).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_coserve.core.step_stats import StepStats

__all__ = ["pipelined"]


def pipelined(
    predict: Callable[[StepStats], float], batch: StepStats, overlapping: Sequence[StepStats]
) -> tuple[float, bool]:
    """Return the seconds of a step in a pipeline, and whether no overlapping batch is slower.

    Between its start and its tokens K steps begin, including itself. At each start all
    batches advance by one stage, which takes 1/K of the time of the slowest. O(K**2).

    Args:
        predict: Returns the seconds of a batch that passes through all stages alone.
        batch: The batch of the step.
        overlapping: The K - 1 batches before it and the K - 1 after it, in order; empty if K is 1.
    """
    alone_s = predict(batch)
    if not overlapping:
        return alone_s, True
    others_s = [0.0 if other.is_empty else predict(other) for other in overlapping]
    before = len(others_s) // 2
    depth = before + 1
    all_s = [*others_s[:before], alone_s, *others_s[before:]]
    total_s = sum(max(all_s[first : first + depth]) for first in range(depth))
    return total_s / depth, alone_s >= max(others_s)
