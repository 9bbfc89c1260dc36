"""Counters of a run that cannot be derived from the timelines of requests."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["Counters"]


@dataclass(slots=True)
class Counters:
    """Totals of a run so far."""

    iterations: int = 0
    busy_s: float = 0.0
    """Time in steps; otherwise the device was idle."""

    online_tokens: int = 0
    """Tokens computed for online requests, including recomputed ones."""

    offline_tokens: int = 0
    retractions: int = 0
    pauses: int = 0
    suspensions: int = 0
    """How often a step was suspended at a safepoint."""

    drops: int = 0
    """Suspended steps that were dropped to free their memory."""

    def to_dict(self) -> dict[str, float | int]:
        """Return the fields by name."""
        return asdict(self)
