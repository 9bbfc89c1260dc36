"""Settings of the scheduler that every policy shares."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang_coserve.errors import ConfigError

__all__ = ["OnlineOrder", "Overload", "SchedulerConfig"]


class OnlineOrder(Enum):
    """Which waiting online request is next."""

    FCFS = "fcfs"
    """In order of arrival."""

    VTC = "vtc"
    """The user who was served least so far (Virtual Token Counter, Sheng et al., OSDI 24)."""


class Overload(Enum):
    """What to do when online requests alone cannot meet their targets (OOCO §3.4.4)."""

    BEST_EFFORT = "best_effort"
    """Serve all of them, late."""

    SHED = "shed"
    """Refuse waiting requests that can no longer meet their TTFT target, and admit none that
    would break the TPOT target of those that run."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the scheduler that every policy shares.

    Raises:
        ConfigError: a value is out of its range; the message names the field.
    """

    iteration_budget_s: float | None = None
    """Latency budget of an iteration that holds online work (HyGen §4.2's searched budget);
    ``None``: the targets alone bound it. What online needs by itself may exceed it."""

    arrival_wait_s: float | None = None
    """Longest iteration that offline work may fill, since an online request that arrives
    meanwhile waits for its end. ``None``: learned, so that the TTFT target holds for all but a
    hundredth of the requests (``Allowance``); infinite without a target."""

    margin: float = 0.05
    """Part of every latency budget that is left free for prediction error."""

    online_order: OnlineOrder = OnlineOrder.FCFS
    overload: Overload = Overload.BEST_EFFORT

    min_online_chunk_tokens: int = 128
    """Under ``Overload.BEST_EFFORT``: tokens of prefill that the first waiting online request
    gets in every iteration, though decodes miss their target. 0: decodes come first."""

    min_chunk_tokens: int = 16
    """An offline prefill is not cut into chunks smaller than this."""

    headroom_tokens: int = 64
    """KV kept free for each running row when a new offline request is admitted, so that the
    admitted one is not evicted again at once."""

    max_offline_rows: int | None = None
    """Most offline requests that may hold KV at once; ``None``: only memory bounds them."""

    max_picks: int = 64
    """Most offline requests taken from the queue in one iteration; bounds the planning time."""

    utility_ratio: float | None = None
    """Of the policies whose queue shares prefixes, how often a pick does rather than being the
    oldest request (HyGen's u); ``None``: as the policy has it."""

    random_picks: int | None = None
    """Of OOCO, how many offline decodes are drawn at random (K of its Algorithm 2); ``None``: as
    the policy has it."""

    refine: bool = False
    """Let ``Scheduler.update`` correct the latency model."""

    seed: int = 0
    """Seed of the policies that draw at random."""

    def __post_init__(self) -> None:
        """Check every range."""
        for name in ("iteration_budget_s", "arrival_wait_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"scheduler: {name} is {value}: use a positive time or None")
        if not 0 <= self.margin < 1:
            raise ConfigError(f"scheduler: margin is {self.margin}: use a number from 0 to below 1")
        if self.utility_ratio is not None and not 0 <= self.utility_ratio <= 1:
            raise ConfigError(
                f"scheduler: utility_ratio is {self.utility_ratio}: use a number from 0 to 1"
            )
        if self.max_offline_rows is not None and self.max_offline_rows < 1:
            raise ConfigError(
                f"scheduler: max_offline_rows is {self.max_offline_rows}: use at least 1, or None"
            )
        for name, least in (
            ("min_online_chunk_tokens", 0),
            ("min_chunk_tokens", 1),
            ("headroom_tokens", 0),
            ("max_picks", 1),
            ("random_picks", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(
                    f"scheduler: {name} is {value}: use an integer of at least {least}"
                )
