"""The objects that lines share, whatever job they are of."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sglang_coserve.lines.backend import LineBackend
from sglang_coserve.lines.clock import Clock
from sglang_coserve.lines.engine_lines import EngineLines
from sglang_coserve.lines.fair_slots import FairSlots
from sglang_coserve.lines.retry import EngineHealth, RetryPolicy
from sglang_coserve.lines.worker_threads import WorkerThreads

__all__ = ["AttemptContext", "LineContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptContext:
    """What is needed to serve one line, with retries."""

    backend: LineBackend
    engine_lines: EngineLines
    clock: Clock

    rng: random.Random
    """Source of ids and of the jitter of retries."""

    retry_policy: RetryPolicy
    health: EngineHealth


@dataclass(frozen=True, slots=True, kw_only=True)
class LineContext(AttemptContext):
    """Everything that a job needs to serve its lines, shared by all jobs."""

    slots: FairSlots
    threads: WorkerThreads

    flush_interval_s: float
    """Longest time that a result waits to be written together with others."""

    journal_interval_s: float
    """Interval of journal writes, i.e. the most generation time that a crash can lose."""
