"""Settings of the offline queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from sglang_coserve.core.validation import check_ranges


@dataclass(frozen=True, slots=True)
class OfflineQueueConfig:
    """How the queue weighs prefix sharing, age, deadlines and length.

    Raises:
        ConfigError: a value is out of range; the message names the field.
    """

    utility_ratio: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Probability that a pick follows the prefix trie rather than age (HyGen A.3's u):
    1 shares prefixes as much as possible, 0 serves in order of arrival."""

    max_overtakes: Annotated[int | None, Field(ge=0)] = 64
    """Most consecutive picks that may pass over the oldest request; ``None``: no limit."""

    deadline_slack_s: Annotated[float | None, Field(ge=0)] = 600.0
    """A request goes before those without time pressure once less than this is left
    until its latest start; ``None``: deadlines do not matter."""

    longest_first: bool = True
    """Whether a request that alone would run longer than all waiting work takes, spread over the
    running requests, goes before those without time pressure."""

    seed: int = 0
    """Seed of the draws that the utility ratio needs."""

    def __post_init__(self) -> None:
        check_ranges(self, "offline queue: {}".format)

    @classmethod
    def fcfs(cls) -> OfflineQueueConfig:
        """Return settings for first come, first served, except that deadlines at risk go first."""
        return cls(utility_ratio=0.0, longest_first=False)
