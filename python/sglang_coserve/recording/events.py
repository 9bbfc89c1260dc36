"""The calls made to a scheduler, as immutable values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from msgspec import Struct

from sglang_coserve.core.offline_queue import QueuedRequest
from sglang_coserve.core.request import Ending
from sglang_coserve.core.snapshot import EngineSnapshot, RequestInfo
from sglang_coserve.core.step import PrefillChunk, StepPlan, StepResult


class _Call(Struct, frozen=True, forbid_unknown_fields=True, tag_field="event"):
    """A call, named by its tag where it is written as it is."""


class Arrived(_Call, frozen=True, tag="arrived"):
    """``Scheduler.arrived`` was called."""

    info: RequestInfo
    cached_tokens: int


class OfflineAdded(_Call, frozen=True, tag="added"):
    """``Scheduler.add_offline`` was called."""

    request: QueuedRequest


class Cached(_Call, frozen=True, tag="cached"):
    """``Scheduler.cached`` was called."""

    rid: str
    cached_tokens: int


class NoRoom(_Call, frozen=True, tag="no_room"):
    """``Scheduler.no_room`` was called."""

    rid: str


class Planned(_Call, frozen=True, tag="planned"):
    """``Scheduler.plan`` was called, and returned ``plan``."""

    snapshot: EngineSnapshot
    cached_tokens: Mapping[str, int | None]
    """The answers of the prefix cache: cached tokens of each request queried, by rid."""

    plan: StepPlan


class Started(_Call, frozen=True, tag="started"):
    """``Scheduler.start`` was called with the last plan."""

    chunks: tuple[PrefillChunk, ...]


class Updated(_Call, frozen=True, tag="updated"):
    """``Scheduler.update`` was called."""

    result: StepResult


class Restored(_Call, frozen=True, tag="restored"):
    """``Scheduler.restore`` was called."""

    rid: str
    generated_tokens: int


class Finished(_Call, frozen=True, tag="finished"):
    """``Scheduler.finish`` was called."""

    rid: str
    ending: Ending = Ending.COMPLETE


Event: TypeAlias = (
    Arrived | OfflineAdded | Cached | NoRoom | Planned | Started | Updated | Restored | Finished
)
