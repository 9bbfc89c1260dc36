"""Settings of the scheduler that every policy shares."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from sglang_coserve.core.ranges import NOT_NEGATIVE, POSITIVE, check_ranges


class Overload(Enum):
    """What to do when online requests alone cannot meet their targets (OOCO §3.4.4)."""

    BEST_EFFORT = "best_effort"
    """Serve all of them, late."""

    SHED = "shed"
    """Refuse waiting requests that can no longer meet their TTFT target, and admit none that
    would make running requests miss their TPOT target."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the scheduler that every policy shares.

    Raises:
        ConfigError: a value is out of range; the message names the field.
    """

    iteration_budget_s: Annotated[float | None, POSITIVE] = None
    """Latency budget of a step with online work (the budget that HyGen §4.2 searches for);
    ``None``: only the targets bound it. Online work alone may exceed it."""

    overload: Overload = Overload.BEST_EFFORT

    stream_slowdown: Annotated[float | None, NOT_NEGATIVE] = None
    """Longest time that offline work adds to a step with online decodes, as a fraction of the time
    that the decodes take alone: with 1.0 streams keep at least half of their speed. A target for
    TPOT or gaps replaces it. ``None``: no limit without a target."""

    min_chunk_tokens: Annotated[int, POSITIVE] = 16
    """Smallest chunk into which an offline prefill is cut."""

    headroom_tokens: Annotated[int, NOT_NEGATIVE] = 512
    """KV kept free for each running request when a new offline request is admitted, so that it is
    not retracted again at once; at most an eighth of all KV. Simulated on an H100 at 80% load,
    prompts of 2,048 and outputs of 64 tokens: 6,079 offline tokens/s and 52 retractions, with 64
    tokens 4,798 and 228."""

    max_offline_requests: Annotated[int | None, POSITIVE] = None
    """Most offline requests that may hold KV at once; ``None``: only memory bounds them."""

    max_picks: Annotated[int, POSITIVE] = 64
    """Most offline requests taken from the queue in one step; bounds the planning time."""

    refine: bool = False
    """Whether ``Scheduler.update`` corrects the latency model."""

    seed: int = 0
    """Seed of the policies that draw at random."""

    def __post_init__(self) -> None:
        check_ranges(self, "scheduler: {}".format)
