"""What the scheduler tells of itself to what composes a step."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_coserve.core.control.allowance import Allowance
from sglang_coserve.core.offline_queue import OfflineQueue
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import PrefixCache


@dataclass(frozen=True, slots=True)
class PlanContext:
    """Read-only state of the scheduler during one call of ``plan``."""

    config: SchedulerConfig
    queue: OfflineQueue
    cache: PrefixCache
    allowance: Allowance
    step: int
    """Number of the step; together with the seed it makes random draws reproducible."""

    prompt_s: float
    """Longest time, in seconds, that the step may add to the TTFT of the requests that wait."""

    resume_s: float
    """What it costs to suspend a step and resume it."""

    timely: float
    """Share of a time until which a step must be predicted to end, to end in that time."""

    is_plain: bool
    """Online work runs as in plain SGLang: no offline work is there, and no target asks for
    other latencies."""

    mixes_decodes: bool
    """Plain SGLang would run decodes in the same step as prompts, instead of after them."""
