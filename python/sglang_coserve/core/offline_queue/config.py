"""Settings of the offline queue."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_coserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OfflineQueueConfig:
    """How the queue weighs prefix sharing, age, deadlines and length.

    Raises:
        ConfigError: a value is out of range; the message names the field.
    """

    utility_ratio: float = 0.95
    """Probability that a pick follows the prefix trie rather than age (HyGen A.3's u):
    1 shares prefixes as much as possible, 0 serves in order of arrival."""

    max_overtakes: int | None = 64
    """Most consecutive picks that may pass over the oldest request; ``None``: no limit."""

    max_wait_s: float | None = None
    """Age from which requests are served in order of arrival, before anything else;
    ``None``: no limit. A value below the time the backlog takes to drain gives up
    prefix sharing, since every request then gets that old."""

    deadline_slack_s: float | None = 600.0
    """A request goes before those without time pressure once less than this is left
    until its latest start; ``None``: deadlines do not matter."""

    longest_first: bool = True
    """Whether a request that alone would run longer than all waiting work takes, spread over the
    running requests, goes before those without time pressure."""

    seed: int = 0
    """Seed of the draws that the utility ratio needs."""

    def __post_init__(self) -> None:
        """Check every range."""
        _check(0 <= self.utility_ratio <= 1, "utility_ratio", self.utility_ratio, "from 0 to 1")
        if self.max_overtakes is not None:
            _check(self.max_overtakes >= 0, "max_overtakes", self.max_overtakes, "at least 0")
        if self.max_wait_s is not None:
            _check(0 <= self.max_wait_s < math.inf, "max_wait_s", self.max_wait_s, "at least 0")
        if self.deadline_slack_s is not None:
            _check(
                0 <= self.deadline_slack_s < math.inf,
                "deadline_slack_s",
                self.deadline_slack_s,
                "at least 0",
            )

    @classmethod
    def fcfs(cls) -> OfflineQueueConfig:
        """Return settings for first come, first served, except that deadlines at risk go first."""
        return cls(utility_ratio=0.0, longest_first=False)


def _check(is_valid: bool, field: str, value: float, valid: str) -> None:
    if not is_valid:
        raise ConfigError(f"offline queue: {field} is {value}: use a number {valid}")
