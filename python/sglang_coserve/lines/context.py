"""What the jobs of one process share."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sglang_coserve.lines.backend import LineBackend
from sglang_coserve.lines.clock import Clock
from sglang_coserve.lines.engine_lines import EngineLines
from sglang_coserve.lines.fair_slots import FairSlots
from sglang_coserve.lines.retry import EngineHealth, RetryPolicy
from sglang_coserve.lines.worker_threads import WorkerThreads

__all__ = ["LineContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineContext:
    """The means of serving lines."""

    backend: LineBackend
    engine_lines: EngineLines
    slots: FairSlots
    threads: WorkerThreads
    clock: Clock

    rng: random.Random
    """Of ids and of the jitter between retries."""

    retry_policy: RetryPolicy
    health: EngineHealth

    flush_interval_s: float
    """How long a result may wait for others to be written with it."""

    journal_interval_s: float
    """How much generation a crash may cost."""
