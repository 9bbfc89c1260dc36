"""Keeps aborts of batches in flight from starving offline work."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sglang_coserve.core.token_bucket import TokenBucket
from sglang_coserve.errors import ConfigError

__all__ = ["GuardConfig", "PreemptionGuard"]


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """How much offline work aborts may cost.

    Raises:
        ConfigError: a value is out of its range.
    """

    max_aborts_in_a_row: int = 8
    """A request whose iterations were aborted this often without one that ended protects the
    next batch it is in."""

    wasted_share: float = 0.2
    """Part of all time that aborted iterations may have taken, in the long run."""

    burst_s: float = 1.0
    """Time that aborts may waste beyond that in a burst of arrivals."""

    def __post_init__(self) -> None:
        """Check every range."""
        if self.max_aborts_in_a_row < 1:
            raise ConfigError(
                f"preemption guard: max_aborts_in_a_row is {self.max_aborts_in_a_row}: use an "
                "integer of at least 1"
            )
        if not 0 < self.wasted_share <= 1:
            raise ConfigError(
                f"preemption guard: wasted_share is {self.wasted_share}: use a number above 0, at "
                "most 1"
            )
        if not self.burst_s > 0:
            raise ConfigError(f"preemption guard: burst_s is {self.burst_s}: use a positive time")


class PreemptionGuard:
    """Decides which batches may be aborted, from what aborts have cost so far.

    ConServe aborts whenever an online request would be late (Algorithm 2). Under
    steady arrivals that alone could throw every offline iteration away. Two
    bounds hold here:

    - In any span T the iterations thrown away took at most
      ``wasted_share``·T + ``burst_s`` and one iteration more: a token bucket.
    - A request loses at most ``max_aborts_in_a_row`` iterations in a row.

    Tensor-parallel ranks that report the same events get the same answers.
    """

    def __init__(self, config: GuardConfig | None = None) -> None:
        self._config = config = config or GuardConfig()
        self._bucket = TokenBucket(rate=config.wasted_share, capacity=config.burst_s)
        self._aborts_in_a_row: dict[str, int] = {}

    def can_afford(self, now_s: float) -> bool:
        """Return whether one more iteration may be thrown away."""
        return self._bucket.level(now_s) > 0

    @property
    def has_protected(self) -> bool:
        """True while a request waits for the iteration that it protects. O(aborted requests)."""
        limit = self._config.max_aborts_in_a_row
        return any(streak >= limit for streak in self._aborts_in_a_row.values())

    def may_abort(self, now_s: float) -> bool:
        """Return whether the next iteration may be planned as one that arrivals abort."""
        return self.can_afford(now_s) and not self.has_protected

    def protects(self, rids: Iterable[str]) -> bool:
        """Return whether a batch with these offline requests has to run to its end. O(rids)."""
        streaks, limit = self._aborts_in_a_row, self._config.max_aborts_in_a_row
        return bool(streaks) and any(streaks.get(rid, 0) >= limit for rid in rids)

    def aborted(self, rids: Iterable[str], now_s: float, wasted_s: float) -> None:
        """Note that a batch with these offline requests was aborted after ``wasted_s``."""
        self._bucket.take(wasted_s, now_s)
        for rid in rids:
            self._aborts_in_a_row[rid] = self._aborts_in_a_row.get(rid, 0) + 1

    def completed(self, rids: Collection[str]) -> None:
        """Note that a batch with these requests ran to its end. O(rids) after an abort."""
        if self._aborts_in_a_row:
            for rid in rids:
                self._aborts_in_a_row.pop(rid, None)

    def forget(self, rid: str) -> None:
        """Drop what is known of a request that has ended."""
        self._aborts_in_a_row.pop(rid, None)
