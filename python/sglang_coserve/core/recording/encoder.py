"""Writes recordings as JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import from_json, to_json

from sglang_coserve.core.offline_queue import unpack_tokens
from sglang_coserve.core.recording.events import (
    Arrived,
    Event,
    Finished,
    OfflineAdded,
    Planned,
    Updated,
)
from sglang_coserve.core.recording.line_format import (
    EVENTS,
    FORMAT,
    STATE_LETTERS,
    VERSION,
    AddedLine,
    ArrivedLine,
    Header,
    PlannedLine,
    RequestColumns,
    ServedColumns,
    UpdatedLine,
)
from sglang_coserve.core.recording.setup import SchedulerSetup
from sglang_coserve.core.snapshot import EngineSnapshot, Request, RequestInfo
from sglang_coserve.core.step import ServedRequest, StepPlan, StepResult

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["EventEncoder", "encode_setup"]

_NAMES: Final = MappingProxyType({kind: name for name, kind in EVENTS.items()})
_ENGINE_FIELDS: Final = tuple(
    field.name
    for field in fields(EngineSnapshot)
    if field.name not in ("admitted", "waiting", "elsewhere")
)
_EMPTY_PLAN: Final = StepPlan()


def encode_setup(setup: SchedulerSetup) -> str:
    """Return the first line of a recording."""
    profile = from_json(setup.profile.to_json())
    config = _fields(setup.config)
    return _text(Header(FORMAT, VERSION, setup.policy, setup.slos, setup.engine, config, profile))


class EventEncoder:
    """Encodes the events of one recording, in order, into the lines after the first."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, RequestInfo]] = {}
        self._num_known = 0

    def encode(self, event: Event) -> str:
        """Return the line of an event; O(requests) for a plan."""
        line = self._line(event)
        if isinstance(event, Finished):
            self._known.pop(event.rid, None)
        return _text({"event": _NAMES[type(event)], **_fields(line)})

    def _line(self, event: Event) -> Event | AddedLine | ArrivedLine | PlannedLine | UpdatedLine:
        new: list[RequestInfo] = []
        match event:
            case Arrived(info, cached_tokens):
                return ArrivedLine(new, self._number(info, new), cached_tokens)
            case OfflineAdded(request):
                token_ids = unpack_tokens(request.token_ids).tolist()
                return AddedLine(_fields(request) | {"token_ids": token_ids})
            case Planned(snapshot, answers, plan):
                return PlannedLine(
                    {name: getattr(snapshot, name) for name in _ENGINE_FIELDS},
                    new,
                    self._columns(snapshot.admitted, new),
                    self._columns(snapshot.waiting, new),
                    self._columns(snapshot.elsewhere, new),
                    list(answers.items()),
                    _changes(plan, _EMPTY_PLAN),
                )
            case Updated(result):
                return UpdatedLine(new, self._result(result, new))
            case _:
                return event

    def _result(self, result: StepResult, new: list[RequestInfo]) -> dict[str, Any]:
        empty = StepResult(result.step, result.started_s, served=result.served)
        values: dict[str, Any] = {"step": result.step, "started_s": result.started_s}
        values |= _changes(result, empty)
        if result.served:
            values["served"] = self._served_columns(result.served, new)
        # Requests first seen here have ended, as no snapshot named them: no later line refers to
        # them.
        for info in new:
            self._known.pop(info.rid, None)
        return values

    def _served_columns(
        self, served: Sequence[ServedRequest], new: list[RequestInfo]
    ) -> ServedColumns:
        infos, last_tokens, tokens = zip(*served, strict=True)
        times, places = _numbered([*last_tokens, *tokens])
        numbers = [self._number(info, new) for info in infos]
        return ServedColumns(numbers, places[: len(served)], places[len(served) :], times)

    def _columns(
        self, requests: Sequence[Request], new: list[RequestInfo]
    ) -> RequestColumns | None:
        if not requests:
            return None
        infos, states, generated, computed, cached, last_tokens = zip(*requests, strict=True)
        times, places = _numbered(last_tokens)
        numbers = [self._number(info, new) for info in infos]
        letters = "".join([STATE_LETTERS[state] for state in states])
        return RequestColumns(numbers, letters, generated, computed, cached, places, times)

    def _number(self, info: RequestInfo, new: list[RequestInfo]) -> int:
        known = self._known.get(info.rid)
        if known is None or (known[1] is not info and known[1] != info):
            new.append(info)
            known = self._known[info.rid] = self._num_known, info
            self._num_known += 1
        return known[0]


def _text(line: object) -> str:
    return to_json(line, inf_nan_mode="strings", ensure_ascii=True).decode() + "\n"


def _numbered(times_s: Sequence[float | None]) -> tuple[list[float | None], list[int]]:
    """Return the distinct times, and for each of ``times_s`` its index among them.

    Most requests got their last token at the same time.
    """
    places = {time_s: place for place, time_s in enumerate(dict.fromkeys(times_s))}
    return list(places), [places[time_s] for time_s in times_s]


def _changes(value: StepPlan | StepResult, base: StepPlan | StepResult) -> dict[str, Any]:
    """Return the fields in which ``value`` differs from ``base``."""
    return {name: item for name, item in _fields(value).items() if item != getattr(base, name)}


def _fields(value: DataclassInstance) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}
