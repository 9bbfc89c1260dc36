"""Recordings to JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final

from sglang_coserve.core.recording.events import Committed, Event, Finished, Planned
from sglang_coserve.core.recording.line_format import EVENTS, FORMAT, STATE_LETTERS, VERSION
from sglang_coserve.core.recording.plain import to_plain
from sglang_coserve.core.recording.setup import SchedulerSetup
from sglang_coserve.core.snapshot import EngineSnapshot, RequestInfo, Row, StepPlan

__all__ = ["EventEncoder", "encode_setup"]

_NAMES: Final = MappingProxyType({kind: name for name, kind in EVENTS.items()})
_ENGINE_FIELDS: Final = tuple(
    field.name for field in fields(EngineSnapshot) if field.name not in ("rows", "waiting")
)
_PLAN_FIELDS: Final = tuple(field.name for field in fields(StepPlan))
_EMPTY_PLAN: Final = StepPlan()


def encode_setup(setup: SchedulerSetup) -> str:
    """Return the first line of a recording."""
    return _line(
        {
            "format": FORMAT,
            "version": VERSION,
            "policy": setup.policy,
            "targets": to_plain(setup.targets),
            "config": to_plain(setup.config),
            "profile": json.loads(setup.profile.to_json()),
        }
    )


class EventEncoder:
    """Turns the events of one recording, in order, into its other lines."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, RequestInfo]] = {}
        self._num_known = 0
        self._planned = _EMPTY_PLAN

    def encode(self, event: Event) -> str:
        """Return the line of an event; O(rows) for a plan."""
        if isinstance(event, Planned):
            values = self._planned_values(event)
            self._planned = event.plan
        elif isinstance(event, Committed):
            values = {"plan": _changes(event.plan, self._planned)}
        else:
            values = to_plain(event)
        if isinstance(event, Finished):
            self._known.pop(event.rid, None)
        return _line({"event": _NAMES[type(event)], **values})

    def _planned_values(self, event: Planned) -> dict[str, Any]:
        snapshot = event.snapshot
        new: list[RequestInfo] = []
        rows, waiting = self._columns(snapshot.rows, new), self._columns(snapshot.waiting, new)
        return {
            "engine": {name: to_plain(getattr(snapshot, name)) for name in _ENGINE_FIELDS},
            "new": to_plain(new),
            "rows": rows,
            "waiting": waiting,
            "cached_tokens": to_plain(event.cached_tokens),
            "plan": _changes(event.plan, _EMPTY_PLAN),
        }

    def _columns(self, rows: Sequence[Row], new: list[RequestInfo]) -> dict[str, Any] | None:
        if not rows:
            return None
        infos, states, generated, computed, cached, last_tokens = zip(*rows, strict=True)
        # Most rows got their last token at the same time.
        places = {time_s: place for place, time_s in enumerate(dict.fromkeys(last_tokens))}
        return {
            "request": [self._number(info, new) for info in infos],
            "state": "".join([STATE_LETTERS[state] for state in states]),
            "generated": generated,
            "computed": computed,
            "cached": cached,
            "last_token": [places[time_s] for time_s in last_tokens],
            "times_s": to_plain(list(places)),
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


def _changes(plan: StepPlan, base: StepPlan) -> dict[str, Any]:
    return {
        name: to_plain(value)
        for name in _PLAN_FIELDS
        if (value := getattr(plan, name)) != getattr(base, name)
    }
