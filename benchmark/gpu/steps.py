"""What there is to measure, the most valuable first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["STEPS", "Step", "select"]

LIMIT_S: Final = 480.0


@dataclass(frozen=True, slots=True)
class Step:
    """One process that measures one thing, and goes on where an earlier one was stopped."""

    name: str
    module: str
    """Run with ``python -m``; sees ``benchmark/`` and ``python/`` on its path. Several steps may
    share one, which knows them by name."""

    question: str
    """What its figures answer, for the tables."""

    least_s: float
    """With less time than this, it is not worth starting."""

    limit_s: float = LIMIT_S
    """Longest time of one attempt."""


STEPS: Final = (
    Step("smoke", "gpu.smoke", "Does the stack serve both classes, with CUDA graphs?", 120),
    Step("profile", "gpu.profile", "How well are iteration times predicted?", 120),
    Step("coload", "gpu.coload", "Both classes on one engine, Gamma arrivals at 2 req/s", 200),
    Step("safepoint", "gpu.safepoint", "What safepoints cost, and how soon they free the GPU", 90),
    Step("kv", "gpu.kv", "KV checkpoints: bandwidth, reclaim, resume, interference, a race", 60),
    Step("overlap", "gpu.overlap", "Scheduling overhead of an iteration, overlap on and off", 120),
    Step("tests", "gpu.gpu_tests", "Tests that need a GPU", 60),
    Step("coload-rates", "gpu.coload", "The same at 1, 3 and 4 req/s", 200),
    Step("coload-azure", "gpu.coload", "The same with arrivals like Azure's", 200),
    Step("coload-burstgpt", "gpu.coload", "The same with arrivals like BurstGPT's", 200),
)


def select(names: Sequence[str]) -> tuple[Step, ...]:
    """Return the steps of these names in order of value.

    Raises:
        ValueError: a name is unknown.
    """
    unknown = sorted(set(names) - {step.name for step in STEPS})
    if unknown:
        known = ", ".join(step.name for step in STEPS)
        raise ValueError(f"unknown step {', '.join(unknown)}: known are {known}")
    return tuple(step for step in STEPS if step.name in names)
