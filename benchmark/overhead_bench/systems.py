"""The schedulers that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["DEFAULT_SYSTEMS", "SYSTEMS", "OverheadSystem"]


@dataclass(frozen=True)
class OverheadSystem:
    """A scheduler to start; stock SGLang's where ``policy`` is None."""

    policy: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)


SYSTEMS: Final = {
    "coserve": OverheadSystem("coserve"),
    "fifo": OverheadSystem("fifo"),
    "stock fcfs": OverheadSystem(),
    "stock priority": OverheadSystem(flags={"enable_priority_scheduling": True}),
    "stock lpm": OverheadSystem(flags={"schedule_policy": "lpm"}),
    "coserve overlap on": OverheadSystem("coserve", {"disable_overlap_schedule": False}),
    "coserve overlap off": OverheadSystem("coserve", {"disable_overlap_schedule": True}),
    "stock overlap on": OverheadSystem(flags={"disable_overlap_schedule": False}),
    "stock overlap off": OverheadSystem(flags={"disable_overlap_schedule": True}),
}
DEFAULT_SYSTEMS: Final = tuple(SYSTEMS)[:5]
"""Those that overlap where SGLang does so by itself."""
