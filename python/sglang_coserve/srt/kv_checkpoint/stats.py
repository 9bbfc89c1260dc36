"""Statistics of KV checkpoints, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

__all__ = ["COUNTED", "CheckpointStats", "ClassStats"]


@dataclass(frozen=True, slots=True)
class ClassStats:
    """Statistics of one class of requests."""

    computed_tokens: int
    recomputed_tokens: int
    """Computed tokens that had been computed before."""

    recompute_tax: float
    """Recomputed ÷ computed tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
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

    host_tokens: int
    """Host slots in use (current)."""

    host_limit_tokens: int
    """The most host slots that may be in use."""

    allocation_failures: int = 0
    """Allocations of host memory refused, as it was exhausted."""

    backed_off_steps: int = 0
    """Steps without copies because of such a refusal."""

    stalled_steps: int = 0
    """Steps without copies because copying was stuck."""

    late_copies: int = 0
    """Nodes dropped because their lazy copy did not end in time."""

    refused_loads: int = 0
    """Loads within a batch refused because other loads were in flight."""

    adopted_tokens: int = 0
    """Saved tokens of retracted requests that were handed over to the tree without a copy."""

    demoted_tokens: int = 0
    """Device slots reclaimed whose tokens were saved."""

    dropped_tokens: int = 0
    """Device slots of offline tokens reclaimed unsaved, which must be recomputed."""

    splits: int = 0
    """Nodes split so that only their end was reclaimed."""

    host_evicted_tokens: int = 0
    prefetch_issued_tokens: int = 0
    prefetch_published_tokens: int = 0
    prefetch_discarded_tokens: int = 0
    releases: int = 0
    release_ms: float
    """Time spent on checkpoints when requests were released."""

    reclaims: int = 0
    reclaim_ms: float
    """Time spent reclaiming device slots."""

    moved_out_tokens: int = 0
    """Tokens of requests that left for another engine, whose KV was left for that."""

    moved_in_tokens: int = 0
    """Tokens whose KV another engine had left and was found."""

    moves_without_kv: int = 0
    """Requests that left, or came, and whose KV was not there in time, damaged or another one's."""

    classes: Mapping[str, ClassStats]
    """By class name."""

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        return asdict(self)


COUNTED: Final = tuple(field.name for field in fields(CheckpointStats) if field.default == 0)
"""The fields of ``CheckpointStats`` that the cache counts, and that only grow."""
