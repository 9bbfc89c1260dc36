"""The schedulers that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["DEFAULT_SYSTEMS", "RUNNING", "SYSTEMS", "System"]

RUNNING: Final = 32
"""Requests that run at a time, on every system."""


@dataclass(frozen=True)
class System:
    """A scheduler to start; stock SGLang's where ``policy`` is None."""

    policy: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)


SYSTEMS: Final = {
    "coserve": System("coserve"),
    "fifo": System("fifo"),
    "stock fcfs": System(),
    "stock priority": System(flags={"enable_priority_scheduling": True}),
    "stock lpm": System(flags={"schedule_policy": "lpm"}),
    "coserve overlap on": System("coserve", {"disable_overlap_schedule": False}),
    "coserve overlap off": System("coserve", {"disable_overlap_schedule": True}),
    "stock overlap on": System(flags={"disable_overlap_schedule": False}),
    "stock overlap off": System(flags={"disable_overlap_schedule": True}),
}
DEFAULT_SYSTEMS: Final = tuple(SYSTEMS)[:5]
"""Those that overlap where SGLang does so by itself."""
