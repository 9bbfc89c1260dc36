"""The format of the lines of a recording.

Line 1 is a ``Header``. Every other line is an event, named as in ``EVENTS``: an
``AddedLine``, ``ArrivedLine``, ``PlannedLine`` or ``UpdatedLine``, or the fields of the event.
Lines refer to requests by number, counted from 0 over the whole recording; ``new`` describes
the requests that occur for the first time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.slo import Slo
from sglang_coserve.core.recording.events import (
    Arrived,
    Cached,
    Finished,
    NoRoom,
    OfflineAdded,
    Planned,
    Restored,
    Started,
    Updated,
)
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import Request, RequestInfo
from sglang_coserve.core.step import ServedRequest

__all__ = [
    "EVENTS",
    "FORMAT",
    "STATE_LETTERS",
    "VERSION",
    "AddedLine",
    "ArrivedLine",
    "Header",
    "PlannedLine",
    "RequestColumns",
    "ServedColumns",
    "UpdatedLine",
]

FORMAT: Final = "coserve plans"
VERSION: Final = 10

EVENTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "arrived": Arrived,
        "added": OfflineAdded,
        "planned": Planned,
        "started": Started,
        "updated": Updated,
        "restored": Restored,
        "finished": Finished,
        "cached": Cached,
        "no_room": NoRoom,
    }
)

STATE_LETTERS: Final[Mapping[RequestState, str]] = MappingProxyType(
    {
        RequestState.WAITING: "W",
        RequestState.PREFILLING: "P",
        RequestState.PARKED: "K",
        RequestState.DECODING: "D",
        RequestState.PAUSED: "S",
        RequestState.FINISHED: "F",
        RequestState.ABORTED: "A",
    }
)

_STATES: Final = MappingProxyType({letter: state for state, letter in STATE_LETTERS.items()})


@dataclass(frozen=True, slots=True)
class Header:
    """The ``SchedulerSetup`` of the recorded scheduler."""

    format: str
    version: int
    policy: str
    slos: tuple[Slo, ...]
    engine: EngineSize
    """Limits of the engine, for the no-interference baseline."""

    config: Mapping[str, Any]
    """The fields of a ``SchedulerConfig``; an infinite time is the string ``Infinity``."""

    profile: Mapping[str, Any]
    """The JSON object written by ``LatencyProfile.to_json``."""


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """Requests by column."""

    request: Sequence[int]
    state: str
    """One of ``STATE_LETTERS`` for each request."""

    generated: Sequence[int]
    computed: Sequence[int]
    cached: Sequence[int]
    last_token: Sequence[int]
    """Index into ``times_s`` of each request's ``last_token_s``; most have the same one."""

    times_s: Sequence[float | None]

    def requests(self, infos: Mapping[int, RequestInfo]) -> list[Request]:
        """Return the requests.

        Raises:
            LookupError: a request number, state letter or time index is unknown.
            ValueError: the columns differ in length.
        """
        columns = zip(
            self.request,
            self.state,
            self.generated,
            self.computed,
            self.cached,
            self.last_token,
            strict=True,
        )
        return [
            Request(infos[number], _STATES[letter], generated, computed, cached, self.times_s[last])
            for number, letter, generated, computed, cached, last in columns
        ]


@dataclass(frozen=True, slots=True)
class ServedColumns:
    """``ServedRequest`` values by column; times are stored as in ``RequestColumns``."""

    request: Sequence[int]
    last_token: Sequence[int]
    token: Sequence[int]
    times_s: Sequence[float | None]

    def served(self, infos: Mapping[int, RequestInfo]) -> list[ServedRequest]:
        """Return the values; raises the same errors as ``RequestColumns.requests``."""
        times_s = self.times_s
        columns = zip(self.request, self.last_token, self.token, strict=True)
        return [
            ServedRequest(infos[number], times_s[last], times_s[token])
            for number, last, token in columns
        ]


@dataclass(frozen=True, slots=True)
class ArrivedLine:
    """``Arrived``."""

    new: Sequence[RequestInfo]
    request: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedLine:
    """``Planned``."""

    engine: Mapping[str, Any]
    """The snapshot without its requests."""

    new: Sequence[RequestInfo]
    admitted: RequestColumns | None
    waiting: RequestColumns | None
    elsewhere: RequestColumns | None
    cached_tokens: Sequence[tuple[str, int | None]]
    plan: Mapping[str, Any]
    """The fields that differ from an empty plan."""


@dataclass(frozen=True, slots=True)
class AddedLine:
    """``OfflineAdded``."""

    request: Mapping[str, Any]
    """The fields of a ``QueuedRequest``; its tokens are a list of ids."""


@dataclass(frozen=True, slots=True)
class UpdatedLine:
    """``Updated``."""

    new: Sequence[RequestInfo]
    result: Mapping[str, Any]
    """The fields that differ from an empty result; ``served`` as ``ServedColumns``."""
