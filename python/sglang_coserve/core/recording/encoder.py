"""Recordings to JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final

from sglang_coserve.core.recording.events import Arrived, Event, Finished, Planned, Updated
from sglang_coserve.core.recording.line_format import EVENTS, FORMAT, STATE_LETTERS, VERSION
from sglang_coserve.core.recording.plain import to_plain
from sglang_coserve.core.recording.setup import SchedulerSetup
from sglang_coserve.core.snapshot import EngineSnapshot, RequestInfo, Row
from sglang_coserve.core.step import Served, StepPlan, StepResult

__all__ = ["EventEncoder", "encode_setup"]

_NAMES: Final = MappingProxyType({kind: name for name, kind in EVENTS.items()})
_ENGINE_FIELDS: Final = tuple(
    field.name
    for field in fields(EngineSnapshot)
    if field.name not in ("rows", "waiting", "elsewhere")
)
_EMPTY_PLAN: Final = StepPlan()


def encode_setup(setup: SchedulerSetup) -> str:
    """Return the first line of a recording."""
    return _line(
        {
            "format": FORMAT,
            "version": VERSION,
            "policy": setup.policy,
            "slos": to_plain(setup.slos),
            "engine": to_plain(setup.engine),
            "config": to_plain(setup.config),
            "profile": json.loads(setup.profile.to_json()),
        }
    )


class EventEncoder:
    """Turns the events of one recording, in order, into its other lines."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, RequestInfo]] = {}
        self._num_known = 0

    def encode(self, event: Event) -> str:
        """Return the line of an event; O(rows) for a plan."""
        if isinstance(event, Planned):
            values = self._planned_values(event)
        elif isinstance(event, Updated):
            values = self._updated_values(event.result)
        elif isinstance(event, Arrived):
            new: list[RequestInfo] = []
            number = self._number(event.info, new)
            values = {"new": to_plain(new), "request": number, "cached_tokens": event.cached_tokens}
        else:
            values = to_plain(event)
        if isinstance(event, Finished):
            self._known.pop(event.rid, None)
        return _line({"event": _NAMES[type(event)], **values})

    def _planned_values(self, event: Planned) -> dict[str, Any]:
        snapshot = event.snapshot
        new: list[RequestInfo] = []
        rows, waiting = self._columns(snapshot.rows, new), self._columns(snapshot.waiting, new)
        elsewhere = self._columns(snapshot.elsewhere, new)
        return {
            "engine": {name: to_plain(getattr(snapshot, name)) for name in _ENGINE_FIELDS},
            "new": to_plain(new),
            "rows": rows,
            "waiting": waiting,
            "elsewhere": elsewhere,
            "cached_tokens": to_plain(event.cached_tokens),
            "plan": _changes(event.plan, _EMPTY_PLAN),
        }

    def _updated_values(self, result: StepResult) -> dict[str, Any]:
        new: list[RequestInfo] = []
        empty = StepResult(result.step, result.started_s, served=result.served)
        values = {"step": result.step, "started_s": to_plain(result.started_s)}
        values |= _changes(result, empty)
        if result.served:
            values["served"] = self._served_columns(result.served, new)
        # They have ended, or a snapshot would have named them: no later line refers to them.
        for info in new:
            self._known.pop(info.rid, None)
        return {"new": to_plain(new), "result": values}

    def _served_columns(self, served: Sequence[Served], new: list[RequestInfo]) -> dict[str, Any]:
        infos, last_tokens, tokens = zip(*served, strict=True)
        times, places = _numbered([*last_tokens, *tokens])
        return {
            "request": [self._number(info, new) for info in infos],
            "last_token": places[: len(served)],
            "token": places[len(served) :],
            "times_s": to_plain(times),
        }

    def _columns(self, rows: Sequence[Row], new: list[RequestInfo]) -> dict[str, Any] | None:
        if not rows:
            return None
        infos, states, generated, computed, cached, last_tokens = zip(*rows, strict=True)
        times, places = _numbered(last_tokens)
        return {
            "request": [self._number(info, new) for info in infos],
            "state": "".join([STATE_LETTERS[state] for state in states]),
            "generated": generated,
            "computed": computed,
            "cached": cached,
            "last_token": places,
            "times_s": to_plain(times),
        }

    def _number(self, info: RequestInfo, new: list[RequestInfo]) -> int:
        known = self._known.get(info.rid)
        if known is None or (known[1] is not info and known[1] != info):
            new.append(info)
            known = self._known[info.rid] = self._num_known, info
            self._num_known += 1
        return known[0]


_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _line(values: Mapping[str, Any]) -> str:
    return _to_json(values) + "\n"


def _numbered(times_s: Sequence[float | None]) -> tuple[list[float | None], list[int]]:
    """Return the different times, and the place of each of ``times_s`` among them.

    Most rows got their last token at the same time.
    """
    places = {time_s: place for place, time_s in enumerate(dict.fromkeys(times_s))}
    return list(places), [places[time_s] for time_s in times_s]


def _changes(value: StepPlan | StepResult, base: StepPlan | StepResult) -> dict[str, Any]:
    """Return the fields in which ``value`` is not as ``base``."""
    return {
        field.name: to_plain(item)
        for field in fields(value)
        if (item := getattr(value, field.name)) != getattr(base, field.name)
    }
