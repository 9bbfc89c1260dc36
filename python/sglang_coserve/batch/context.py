"""The dependencies that all batches of one service share."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sglang_coserve.batch.data_directory import DataDirectory
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.store import Store
from sglang_coserve.lines.backend import Backend
from sglang_coserve.lines.context import LineContext

__all__ = ["JobContext", "new_id"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext(LineContext):
    """The means of running batches."""

    backend: Backend
    directory: DataDirectory
    store: Store
    limits: BatchLimits


def new_id(prefix: str, rng: random.Random) -> str:
    """Return an id that is as unpredictable as ``rng``."""
    return f"{prefix}{rng.getrandbits(96):024x}"
