"""Recordings from JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from sglang_coserve.core.baseline import EngineSize
from sglang_coserve.core.latency_model import LatencyProfile
from sglang_coserve.core.latency_model.json_object import JsonObject
from sglang_coserve.core.recording.events import Arrived, Event, Finished, Planned, Updated
from sglang_coserve.core.recording.line_format import EVENTS, FORMAT, STATE_LETTERS, VERSION
from sglang_coserve.core.recording.plain import from_plain, read_dataclass
from sglang_coserve.core.recording.setup import SchedulerSetup
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.slo import Slo
from sglang_coserve.core.snapshot import EngineSnapshot, RequestInfo, Row
from sglang_coserve.core.step import Served, StepPlan, StepResult
from sglang_coserve.errors import InputFileError

__all__ = ["read_recording"]

_STATES: Final = MappingProxyType({letter: state for state, letter in STATE_LETTERS.items()})

_Line = Mapping[str, object]


def read_recording(lines: Iterable[str], source: str) -> tuple[SchedulerSetup, Iterator[Event]]:
    """Return what was recorded; the events are read as they are asked for.

    A last line without its line feed was cut short when the recording process ended,
    and is left out.

    Raises:
        InputFileError: a line is not as it was written: the first one now, another when
            its event is asked for. The message starts with ``source:number``.
    """
    documents = (
        JsonObject.parse(line, f"{source}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.endswith("\n")
    )
    header = next(documents, None)
    if header is None:
        raise InputFileError(f"{source}: nothing is recorded in it")
    return _read_setup(header), _read_events(documents)


def _read_setup(header: JsonObject) -> SchedulerSetup:
    if header.fields.get("format") != FORMAT:
        header.fail("format", f"expected {FORMAT!r}, which --record-plans writes")
    version = header.integer("version")
    if version != VERSION:
        header.fail(
            "version",
            f"{version} is not {VERSION}, which this version reads: replay it with the version "
            "of sglang_coserve that recorded it, or record again",
        )
    try:
        slos = _field(header.fields, "slos", partial(from_plain, tuple[Slo, ...]))
        engine = _field(header.fields, "engine", partial(from_plain, EngineSize))
        config = _field(header.fields, "config", partial(from_plain, SchedulerConfig))
    except ValueError as error:
        raise _at_line(header, error) from error
    profile = json.dumps(header.child("profile").fields)
    return SchedulerSetup(
        header.text("policy"),
        slos,
        config,
        LatencyProfile.from_json(profile, f"{header.source}: profile"),
        engine,
    )


def _read_events(documents: Iterable[JsonObject]) -> Iterator[Event]:
    decoder = _EventDecoder()
    for document in documents:
        try:
            event = decoder.decode(document.fields)
        except ValueError as error:
            raise _at_line(document, error) from error
        yield event


class _EventDecoder:
    """Turns the lines of one recording, in order, into events.

    Every method raises ``ValueError`` where a line is not as it was written.
    """

    def __init__(self) -> None:
        self._infos: dict[int, RequestInfo] = {}
        self._numbers: dict[str, int] = {}
        self._num_known = 0

    def decode(self, line: _Line) -> Event:
        """Return the event of a line."""
        kind = _field(line, "event", _event_kind)
        if kind is Planned:
            return self._planned_event(line)
        if kind is Updated:
            return self._updated_event(line)
        if kind is Arrived:
            return self._arrived_event(line)
        event: Event = read_dataclass(
            kind, {name: value for name, value in line.items() if name != "event"}
        )
        if isinstance(event, Finished) and event.rid in self._numbers:
            del self._infos[self._numbers.pop(event.rid)]
        return event

    def _arrived_event(self, line: _Line) -> Arrived:
        self._new(line, is_kept=True)
        number = _field(line, "request", partial(from_plain, int))
        if number not in self._infos:
            raise ValueError(f"request: no request has the number {number}")
        return Arrived(self._infos[number], _field(line, "cached_tokens", partial(from_plain, int)))

    def _planned_event(self, line: _Line) -> Planned:
        self._new(line, is_kept=True)
        rows, waiting = (_field(line, name, self._rows) for name in ("rows", "waiting"))
        elsewhere = tuple(_field(line, "elsewhere", self._rows))
        engine = partial(
            read_dataclass, EngineSnapshot, rows=rows, waiting=waiting, elsewhere=elsewhere
        )
        return Planned(
            _field(line, "engine", engine),
            _field(line, "cached_tokens", partial(from_plain, Mapping[str, int])),
            _field(line, "plan", partial(read_dataclass, StepPlan)),
        )

    def _updated_event(self, line: _Line) -> Updated:
        new = self._new(line, is_kept=False)
        event = Updated(_field(line, "result", self._result))
        for number in new:
            del self._infos[number]
        return event

    def _new(self, line: _Line, *, is_kept: bool) -> dict[int, RequestInfo]:
        """Return the requests that this line describes, by number."""
        infos = _field(line, "new", partial(from_plain, tuple[RequestInfo, ...]))
        new = dict(enumerate(infos, start=self._num_known))
        self._infos |= new
        self._num_known += len(new)
        if is_kept:
            self._numbers |= {info.rid: number for number, info in new.items()}
        return new

    def _result(self, value: object) -> StepResult:
        served: list[Served] = []
        if isinstance(value, dict) and "served" in value:
            value = dict(value)
            columns = _field(value, "served", partial(from_plain, _ServedColumns))
            try:
                served = columns.served(self._infos)
            except (KeyError, IndexError, ValueError) as error:
                raise ValueError(f".served: the columns do not fit together: {error}") from error
            del value["served"]
        result: StepResult = read_dataclass(StepResult, value, served=tuple(served))
        return result

    def _rows(self, value: object) -> list[Row]:
        if value is None:
            return []
        columns: _Columns = from_plain(_Columns, value)
        try:
            return columns.rows(self._infos)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f": the columns do not fit together: {error}") from error


@dataclass(frozen=True, slots=True)
class _Columns:
    """Rows by column."""

    request: tuple[int, ...]
    state: str
    generated: tuple[int, ...]
    computed: tuple[int, ...]
    cached: tuple[int, ...]
    last_token: tuple[int, ...]
    times_s: tuple[float | None, ...]

    def rows(self, infos: Mapping[int, RequestInfo]) -> list[Row]:
        """Return the rows; a ``LookupError`` or ``ValueError`` tells that there are none."""
        return [
            Row(infos[number], _STATES[letter], generated, computed, cached, self.times_s[place])
            for number, letter, generated, computed, cached, place in zip(
                self.request,
                self.state,
                self.generated,
                self.computed,
                self.cached,
                self.last_token,
                strict=True,
            )
        ]


@dataclass(frozen=True, slots=True)
class _ServedColumns:
    """What online requests got, by column."""

    request: tuple[int, ...]
    last_token: tuple[int, ...]
    token: tuple[int, ...]
    times_s: tuple[float | None, ...]

    def served(self, infos: Mapping[int, RequestInfo]) -> list[Served]:
        """As ``_Columns.rows``."""
        times_s = self.times_s
        return [
            Served(infos[number], times_s[last], times_s[token])
            for number, last, token in zip(self.request, self.last_token, self.token, strict=True)
        ]


def _event_kind(name: object) -> Any:
    if not isinstance(name, str) or name not in EVENTS:
        raise ValueError(f": expected one of {', '.join(EVENTS)}, found {name!r:.40}")
    return EVENTS[name]


def _field(line: _Line, name: str, read: Callable[[object], Any]) -> Any:
    if name not in line:
        raise ValueError(f"{name}: this field is missing")
    try:
        return read(line[name])
    except ValueError as error:
        raise ValueError(f"{name}{error}") from error


def _at_line(document: JsonObject, error: ValueError) -> InputFileError:
    return InputFileError(f"{document.source}: {str(error).lstrip('.: ')}")
