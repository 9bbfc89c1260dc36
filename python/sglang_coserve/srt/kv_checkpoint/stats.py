"""Statistics of KV checkpoints, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

__all__ = ["COUNTED", "CheckpointStats", "ClassStats"]

COUNTED: Final = (
    *("allocation_failures", "backed_off_steps", "stalled_steps", "late_copies", "refused_loads"),
    *("adopted_tokens", "demoted_tokens", "dropped_tokens", "splits", "host_evicted_tokens"),
    *("prefetch_issued_tokens", "prefetch_published_tokens", "prefetch_discarded_tokens"),
    *("releases", "reclaims"),
    *("moved_out_tokens", "moved_in_tokens", "moves_without_kv"),
)
"""The fields of ``CheckpointStats`` that only grow."""


@dataclass(frozen=True, slots=True)
class ClassStats:
    """Statistics of one class of requests."""

    host_tokens: int
    """Host slots in use now."""

    host_limit_tokens: int
    """Quota of host slots."""

    computed_tokens: int
    recomputed_tokens: int
    """Computed tokens that had been computed before."""

    recompute_tax: float
    """Recomputed ÷ computed tokens."""


@dataclass(frozen=True, slots=True)
class CheckpointStats:
    """Totals since the start, except for fields said to be current."""

    mode: str
    reason: str | None
    """Why ``auto`` is off; None if a mode was chosen explicitly."""

    checkpointed_tokens: int
    """Tokens whose copy to the host began."""

    checkpointed_bytes: int
    lag_tokens: int
    """Tokens whose copy is in flight (current)."""

    allocation_failures: int
    """Allocations of host memory refused, as the quota or the pool was exhausted."""

    backed_off_steps: int
    """Steps without copies because of such a refusal."""

    stalled_steps: int
    """Steps without copies because copying was stuck."""

    late_copies: int
    """Nodes dropped because their lazy copy did not end in time."""

    refused_loads: int
    """Loads within a batch refused because other loads were in flight."""

    adopted_tokens: int
    """Saved tokens of retracted requests that were handed over to the tree without a copy."""

    demoted_tokens: int
    """Device slots reclaimed whose tokens were saved."""

    dropped_tokens: int
    """Device slots of offline tokens reclaimed unsaved, which must be recomputed."""

    splits: int
    """Nodes split so that only their end was reclaimed."""

    host_evicted_tokens: int
    prefetch_issued_tokens: int
    prefetch_published_tokens: int
    prefetch_discarded_tokens: int
    releases: int
    release_ms: float
    """Time spent on checkpoints when requests were released."""

    reclaims: int
    reclaim_ms: float
    """Time spent reclaiming device slots."""

    moved_out_tokens: int
    """Tokens of requests that left for another engine, whose KV was left for that."""

    moved_in_tokens: int
    """Tokens whose KV another engine had left and was found."""

    moves_without_kv: int
    """Requests that left, or came, and whose KV was not there in time, damaged or another one's."""

    classes: Mapping[str, ClassStats]
    """By class name."""

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        return asdict(self)
