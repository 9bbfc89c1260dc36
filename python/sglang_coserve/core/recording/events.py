"""The calls made to a scheduler, as immutable values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from sglang_coserve.core.offline_queue import QueuedRequest
from sglang_coserve.core.request import Ending
from sglang_coserve.core.snapshot import EngineSnapshot, RequestInfo
from sglang_coserve.core.step import PrefillChunk, StepPlan, StepResult

__all__ = [
    "Arrived",
    "Cached",
    "Event",
    "Finished",
    "NoRoom",
    "OfflineAdded",
    "Planned",
    "Restored",
    "Started",
    "Updated",
]


@dataclass(frozen=True, slots=True)
class Arrived:
    """``Scheduler.arrived`` was called."""

    info: RequestInfo
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class OfflineAdded:
    """``Scheduler.add_offline`` was called."""

    request: QueuedRequest


@dataclass(frozen=True, slots=True)
class Cached:
    """``Scheduler.cached`` was called."""

    rid: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class NoRoom:
    """``Scheduler.no_room`` was called."""

    rid: str


@dataclass(frozen=True, slots=True)
class Planned:
    """``Scheduler.plan`` was called, and returned ``plan``."""

    snapshot: EngineSnapshot
    cached_tokens: Mapping[str, int | None]
    """The answers of the prefix cache: cached tokens of each request queried, by rid."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Started:
    """``Scheduler.start`` was called with the last plan."""

    chunks: tuple[PrefillChunk, ...]


@dataclass(frozen=True, slots=True)
class Updated:
    """``Scheduler.update`` was called."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class Restored:
    """``Scheduler.restore`` was called."""

    rid: str
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """``Scheduler.finish`` was called."""

    rid: str
    ending: Ending = Ending.COMPLETE


Event: TypeAlias = (
    Arrived | OfflineAdded | Cached | NoRoom | Planned | Started | Updated | Restored | Finished
)
