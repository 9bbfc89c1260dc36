"""What checkpointing has done so far, in plain values."""

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
)
"""The fields of ``CheckpointStats`` that only grow."""


@dataclass(frozen=True, slots=True)
class ClassStats:
    """Of one class of requests."""

    host_tokens: int
    """Host slots held now."""

    host_limit_tokens: int
    """Its quota."""

    computed_tokens: int
    recomputed_tokens: int
    """Of the computed ones, those that had been computed before."""

    recompute_tax: float
    """Recomputed by computed tokens."""


@dataclass(frozen=True, slots=True)
class CheckpointStats:
    """Totals since the start, but for what is said to be of now."""

    mode: str
    reason: str | None
    """Why ``auto`` has it off; None where a mode was chosen."""

    checkpointed_tokens: int
    """Tokens whose copy to the host began."""

    checkpointed_bytes: int
    lag_tokens: int
    """Now: tokens whose copy has begun and not ended."""

    allocation_failures: int
    """Times that host memory was refused: quota or pool full."""

    backed_off_steps: int
    """Iterations without copies because of such a refusal."""

    stalled_steps: int
    """Iterations without copies because the copy engine did not answer."""

    late_copies: int
    """Nodes given up because their lazy copy did not end in time."""

    refused_loads: int
    """Requests computed again because a load did not come back in time."""

    adopted_tokens: int
    """Saved tokens of rows that gave way, kept without a copy."""

    demoted_tokens: int
    """Device slots reclaimed of saved tokens."""

    dropped_tokens: int
    """Device slots reclaimed of offline tokens that were not saved: to be recomputed."""

    splits: int
    """Nodes split so that only their tail was reclaimed."""

    host_evicted_tokens: int
    prefetch_issued_tokens: int
    prefetch_published_tokens: int
    prefetch_discarded_tokens: int
    releases: int
    release_ms: float
    """Time that checkpoints took when rows were released."""

    reclaims: int
    reclaim_ms: float
    """Time spent reclaiming device slots."""

    classes: Mapping[str, ClassStats]
    """By the name of the class."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)
