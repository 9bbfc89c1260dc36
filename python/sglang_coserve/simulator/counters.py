"""What a run did, in numbers that no request's timeline holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["Counters"]


@dataclass(slots=True)
class Counters:
    """Sums over a run so far."""

    iterations: int = 0
    busy_s: float = 0.0
    """Time in iterations; the rest the device was idle."""

    online_tokens: int = 0
    """Tokens computed for online requests, also ones computed again."""

    offline_tokens: int = 0
    evictions: int = 0
    pauses: int = 0
    suspensions: int = 0
    """How often a step stopped at a safepoint, to go on later."""

    drops: int = 0
    """Suspended steps that were given up, for their memory."""

    def to_dict(self) -> dict[str, float | int]:
        """Return the fields by name."""
        return asdict(self)
