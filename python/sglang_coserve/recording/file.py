"""Recordings of a scheduler's calls as JSON lines: what ``--record-plans`` writes.

Line 1 describes the ``SchedulerSetup``; every other line is an event. Lines refer to requests by
number, counted from 0 over the whole recording; ``new`` describes those that occur for the first
time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from typing import Any, Final, TypeVar

import msgspec

from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.slo import Slo
from sglang_coserve.core.latency_model.profile import LatencyProfile
from sglang_coserve.core.offline_queue.request import TOKEN_BYTES
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import EngineSnapshot, Request, RequestInfo
from sglang_coserve.core.step import ServedRequest, StepPlan, StepResult
from sglang_coserve.errors import CoserveError, InputFileError
from sglang_coserve.recording.calls import (
    Arrived,
    Cached,
    Event,
    Finished,
    NoRoom,
    OfflineAdded,
    Planned,
    Restored,
    SchedulerSetup,
    Started,
    Updated,
)

T = TypeVar("T")

FORMAT: Final = "coserve plans"
VERSION: Final = 16

_Row = tuple[int, RequestState, int, int, int, float | None]
"""A ``Request``, in the order of its fields: the first is a number."""

_Served = tuple[int, float | None]
"""A ``ServedRequest``, likewise."""


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="event"):
    """A line other than the first. Of engine, plan and result only those fields are written that
    have another value than their default: infinity, say, is no JSON."""


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line."""

    format: str
    version: int
    policy: str
    slos: tuple[Slo, ...]
    engine: EngineSize
    config: SchedulerConfig
    profile: dict[str, Any]
    """The JSON object written by ``LatencyProfile.to_json``."""


class _PlannedLine(_Line, frozen=True, tag="planned"):
    engine: EngineSnapshot
    """Without requests."""

    new: list[RequestInfo]
    admitted: list[_Row]
    waiting: list[_Row]
    elsewhere: list[_Row]
    cached_tokens: Mapping[str, int | None]
    plan: StepPlan


class _UpdatedLine(_Line, frozen=True, tag="updated"):
    new: list[RequestInfo]
    result: StepResult
    """Without ``served``."""

    served: list[_Served]


_EventLine = (
    Arrived
    | OfflineAdded
    | _PlannedLine
    | Started
    | _UpdatedLine
    | Restored
    | Finished
    | Cached
    | NoRoom
)
_LINES: Final = msgspec.json.Decoder[_EventLine](_EventLine)


# --- Writing --------------------------------------------------------------------------------


def encode_setup(setup: SchedulerSetup) -> str:
    """Return the first line of a recording."""
    profile = msgspec.json.decode(setup.profile.to_json())
    return _text(
        _Header(FORMAT, VERSION, setup.policy, setup.slos, setup.engine, setup.config, profile)
    )


class EventEncoder:
    """Encodes the events of one recording, in order, into the lines after the first."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, RequestInfo]] = {}
        self._num_known = 0

    def encode(self, event: Event) -> str:
        """Return the line of an event; O(requests) for a plan."""
        new: list[RequestInfo] = []
        match event:
            case Arrived(info):
                self._introduce(info)
            case Planned(snapshot, answers, plan):
                admitted, waiting, elsewhere = (
                    [(self._number(request.info, new), *request[1:]) for request in requests]
                    for requests in (snapshot.admitted, snapshot.waiting, snapshot.elsewhere)
                )
                line = {
                    "event": "planned",
                    "engine": _changes(replace(snapshot, admitted=(), waiting=(), elsewhere=())),
                    "new": new,
                    "admitted": admitted,
                    "waiting": waiting,
                    "elsewhere": elsewhere,
                    "cached_tokens": answers,
                    "plan": _changes(plan),
                }
                return _text(line)
            case Updated(result):
                served = [(self._number(each.info, new), *each[1:]) for each in result.served]
                # Requests first seen here have ended, as no snapshot named them: no later line
                # refers to them.
                for info in new:
                    self._known.pop(info.rid, None)
                changes = _changes(replace(result, served=()))
                return _text({"event": "updated", "new": new, "result": changes, "served": served})
            case Finished(rid):
                self._known.pop(rid, None)
        return _text(event)

    def _number(self, info: RequestInfo, new: list[RequestInfo]) -> int:
        known = self._known.get(info.rid)
        if known is None or (known[1] is not info and known[1] != info):
            new.append(info)
            return self._introduce(info)
        return known[0]

    def _introduce(self, info: RequestInfo) -> int:
        number = self._num_known
        self._known[info.rid] = number, info
        self._num_known += 1
        return number


def _text(line: object) -> str:
    text = msgspec.json.encode(line).decode()
    return (text if text.isascii() else json.dumps(json.loads(text))) + "\n"


def _changes(value: EngineSnapshot | StepPlan | StepResult) -> dict[str, Any]:
    """Return the fields that have another value than their default."""
    return {
        field.name: item
        for field in fields(value)
        if (item := getattr(value, field.name)) != _default(field)
    }


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


# --- Reading --------------------------------------------------------------------------------


def read_recording(lines: Iterable[str], source: str) -> tuple[SchedulerSetup, Iterator[Event]]:
    """Read a recording; the events are decoded lazily.

    A last line without a line feed was cut short when the recording process ended,
    and is ignored.

    Raises:
        InputFileError: a line is malformed; raised at once for the first line, for others
            when the iterator reaches them. The message starts with ``source:number``.
    """
    numbered = (
        (f"{source}:{number}", line)
        for number, line in enumerate(lines, start=1)
        if line.endswith("\n")
    )
    first = next(numbered, None)
    if first is None:
        raise InputFileError(f"{source}: nothing is recorded in it")
    setup = _read(_setup, *first)
    decoder = _EventDecoder()
    return setup, (_read(decoder.decode, *line) for line in numbered)


def _setup(line: str) -> SchedulerSetup:
    values = msgspec.json.decode(line, type=dict[str, Any])
    if values.get("format") != FORMAT:
        raise InputFileError(f"format: expected {FORMAT!r}, which --record-plans writes")
    if values.get("version") != VERSION:
        raise InputFileError(
            f"version: {values.get('version')!r:.40} is not {VERSION}, which this version reads: "
            "replay it with the version of sglang_coserve that recorded it, or record again"
        )
    header = msgspec.convert(values, _Header)
    profile = msgspec.json.encode(header.profile).decode()
    return SchedulerSetup(
        header.policy,
        header.slos,
        header.config,
        LatencyProfile.from_json(profile, "profile"),
        header.engine,
    )


class _EventDecoder:
    """Decodes the lines of one recording, in order, into events."""

    def __init__(self) -> None:
        self._infos: dict[int, RequestInfo] = {}
        """Of the requests that later lines may refer to, by their numbers."""

        self._numbers: dict[str, int] = {}
        self._num_known = 0
        self._stale: list[int] = []
        """Numbers that only the last line may have referred to."""

    def decode(self, text: str) -> Event:
        """Return the event of a line."""
        # Not before: a line may name two requests of one rid, of which one takes the other's place.
        for number in self._stale:
            del self._infos[number]
        self._stale.clear()
        match _LINES.decode(text):
            case Arrived(info) as event:
                self._introduce([info])
                return event
            case _PlannedLine() as line:
                self._introduce(line.new)
                admitted, waiting, elsewhere = (
                    [Request(self._infos[row[0]], *row[1:]) for row in rows]
                    for rows in (line.admitted, line.waiting, line.elsewhere)
                )
                snapshot = replace(
                    line.engine, admitted=admitted, waiting=waiting, elsewhere=tuple(elsewhere)
                )
                return Planned(snapshot, line.cached_tokens, line.plan)
            case _UpdatedLine() as line:
                self._introduce(line.new)
                served = tuple(ServedRequest(self._infos[row[0]], *row[1:]) for row in line.served)
                for info in line.new:
                    self._forget(info.rid)
                return Updated(replace(line.result, served=served))
            case OfflineAdded(request) as event:
                if (size_bytes := len(request.token_ids)) % TOKEN_BYTES:
                    raise InputFileError(f"request.token_ids: {size_bytes} bytes are no tokens")
                return event
            case Finished(rid) as event:
                self._forget(rid)
                return event
            case Started() | Restored() | Cached() | NoRoom() as event:
                return event
        raise AssertionError("a line is one of these")

    def _introduce(self, infos: Sequence[RequestInfo]) -> None:
        for info in infos:
            self._forget(info.rid)
            self._numbers[info.rid] = self._num_known
            self._infos[self._num_known] = info
            self._num_known += 1

    def _forget(self, rid: str) -> None:
        if (number := self._numbers.pop(rid, None)) is not None:
            self._stale.append(number)


def _read(decode: Callable[[str], T], source: str, line: str) -> T:
    """Return what ``decode`` makes of a line; errors name the line."""
    try:
        return decode(line)
    except msgspec.ValidationError as error:
        raise InputFileError(f"{source}: {_said(error)}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputFileError(f"{source}: not valid JSON: {error}") from error
    except LookupError as error:
        raise InputFileError(f"{source}: it refers to what is not there: {error}") from error
    except (AssertionError, CoserveError, ValueError) as error:
        raise InputFileError(f"{source}: {error}") from error


def _said(error: msgspec.ValidationError) -> str:
    """Return the field, and what is wrong with it."""
    problem, _, field = str(error).partition(" - at `$")
    field = field.rstrip("`").lstrip(".")
    return f"{field}: {problem}" if field else problem
