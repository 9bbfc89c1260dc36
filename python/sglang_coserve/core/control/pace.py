"""The pace of streams: the longest step with online decodes where no target bounds their gaps."""

from __future__ import annotations

from typing import Final

from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.step_stats import StepStats

_LEAST_SLOWDOWN: Final = 0.1
"""Least room, as a fraction of the decodes' own time: offline work can make online decodes so many
that they alone exceed the pace."""


def pace_s(model: LatencyModel, decodes: StepStats, num_alone: int, slowdown: float) -> float:
    """Return the longest time, in seconds, of a step with these online decodes.

    The time is ``1 + slowdown`` times what the decodes would take alone. Nothing is learned and no
    percentile is needed, so the pace is right from the first request on. Where prompts beside
    decodes have a fixed cost (the launch of such a step), the step is long enough for half of the
    added time to be work on prompts: a shorter step would slow streams down for nothing.

    Args:
        model: Predicts the time of steps.
        decodes: Sums over the online decodes; at least one.
        num_alone: Online requests that would decode without offline work. Offline work slows
            decodes, so more of them run at a time; the pace must not grow with their number.
        slowdown: Longest added time, as a fraction of the time alone.
    """
    count = decodes.decode_requests
    num_alone = max(min(num_alone or count, count), 1)
    keys = decodes.decode_context_tokens * num_alone // count
    alone_s = model.predict(StepStats(decode_requests=num_alone, decode_context_tokens=keys))
    decodes_s = model.predict(decodes)
    launch_s = model.predict(decodes.with_prefill(1, 0)) - decodes_s
    least_s = decodes_s + max(2 * launch_s, _LEAST_SLOWDOWN * decodes_s)
    return max((1 + slowdown) * alone_s, least_s)
