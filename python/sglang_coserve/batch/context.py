"""What every batch of one service shares."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sglang_coserve.batch.backend import Backend
from sglang_coserve.batch.clock import Clock
from sglang_coserve.batch.data_directory import DataDirectory
from sglang_coserve.batch.engine_lines import EngineLines
from sglang_coserve.batch.fair_slots import FairSlots
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.store import Store
from sglang_coserve.batch.worker_threads import WorkerThreads

__all__ = ["BatchContext", "ServiceCounts", "new_id"]


@dataclass(slots=True)
class ServiceCounts:
    """What has happened since the service was opened."""

    line_retries: int = 0
    """Attempts at a line that an engine failure before them has made necessary."""


@dataclass(frozen=True, slots=True)
class BatchContext:
    """The means of running batches."""

    directory: DataDirectory
    store: Store
    threads: WorkerThreads
    slots: FairSlots
    engine_lines: EngineLines
    backend: Backend
    limits: BatchLimits
    clock: Clock
    rng: random.Random
    """Of ids and of the jitter between retries."""

    counts: ServiceCounts


def new_id(prefix: str, rng: random.Random) -> str:
    """Return an id that cannot be guessed when ``rng`` cannot."""
    return f"{prefix}{rng.getrandbits(96):024x}"
