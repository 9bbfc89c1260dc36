"""Reads recordings from JSON lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from sglang_coserve.core.latency_model import LatencyProfile
from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
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
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import EngineSnapshot, Request, RequestInfo
from sglang_coserve.core.step import ServedRequest, StepPlan, StepResult
from sglang_coserve.core.validation import explain
from sglang_coserve.errors import CoserveError, InputFileError

__all__ = ["read_recording"]

T = TypeVar("T")


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
    setup = _read_setup(*first)
    decoder = _EventDecoder()
    return setup, (decoder.decode(*line) for line in numbered)


def _read_setup(source: str, line: str) -> SchedulerSetup:
    fields = _object(source, line)
    if fields.get("format") != FORMAT:
        raise InputFileError(f"{source}: format: expected {FORMAT!r}, which --record-plans writes")
    if fields.get("version") != VERSION:
        raise InputFileError(
            f"{source}: version: {fields.get('version')!r:.40} is not {VERSION}, which this "
            "version reads: replay it with the version of sglang_coserve that recorded it, or "
            "record again"
        )
    header = _read(Header, fields, source)
    profile = to_json(header.profile).decode()
    return SchedulerSetup(
        header.policy,
        header.slos,
        # Times may be infinite, which JSON can express only as a string.
        _read(SchedulerConfig, header.config, source, "config", strict=False),
        LatencyProfile.from_json(profile, f"{source}: profile"),
        header.engine,
    )


class _EventDecoder:
    """Decodes the lines of one recording, in order, into events."""

    def __init__(self) -> None:
        self._infos: dict[int, RequestInfo] = {}
        self._numbers: dict[str, int] = {}
        self._num_known = 0

    def decode(self, source: str, line: str) -> Event:
        """Return the event of a line.

        Raises:
            InputFileError: the line is malformed.
        """
        fields = _object(source, line)
        name = fields.pop("event", None)
        kind = EVENTS.get(name) if isinstance(name, str) else None
        if kind is None:
            raise InputFileError(
                f"{source}: event: expected one of {', '.join(EVENTS)}, found {name!r:.40}"
            )
        if kind is Planned:
            return self._planned(source, _read(PlannedLine, fields, source))
        if kind is Updated:
            return self._updated(source, _read(UpdatedLine, fields, source))
        if kind is Arrived:
            return self._arrived(source, _read(ArrivedLine, fields, source))
        if kind is OfflineAdded:
            return OfflineAdded(_read_queued(source, fields))
        event: Event = _read(kind, fields, source)
        if isinstance(event, Finished) and event.rid in self._numbers:
            del self._infos[self._numbers.pop(event.rid)]
        return event

    def _arrived(self, source: str, line: ArrivedLine) -> Arrived:
        self._new(line.new, is_kept=True)
        if line.request not in self._infos:
            raise InputFileError(f"{source}: request: no request has the number {line.request}")
        return Arrived(self._infos[line.request], line.cached_tokens)

    def _planned(self, source: str, line: PlannedLine) -> Planned:
        self._new(line.new, is_kept=True)
        engine = _read(
            EngineSnapshot, {**line.engine, "admitted": [], "waiting": []}, source, "engine"
        )
        snapshot = replace(
            engine,
            admitted=self._requests(f"{source}: admitted", line.admitted),
            waiting=self._requests(f"{source}: waiting", line.waiting),
            elsewhere=tuple(self._requests(f"{source}: elsewhere", line.elsewhere)),
        )
        plan = _read(StepPlan, line.plan, source, "plan")
        return Planned(snapshot, dict(line.cached_tokens), plan)

    def _updated(self, source: str, line: UpdatedLine) -> Updated:
        new = self._new(line.new, is_kept=False)
        result = dict(line.result)
        served: list[ServedRequest] = []
        if "served" in result:
            path = "result.served"
            columns = _read(ServedColumns, result.pop("served"), source, path)
            served = _joined(f"{source}: {path}", columns.served, self._infos)
        for number in new:
            del self._infos[number]
        return Updated(replace(_read(StepResult, result, source, "result"), served=tuple(served)))

    def _new(self, infos: Sequence[RequestInfo], *, is_kept: bool) -> dict[int, RequestInfo]:
        """Register the requests that a line introduces; return them by number."""
        new = dict(enumerate(infos, start=self._num_known))
        self._infos |= new
        self._num_known += len(new)
        if is_kept:
            self._numbers |= {info.rid: number for number, info in new.items()}
        return new

    def _requests(self, place: str, columns: RequestColumns | None) -> list[Request]:
        return [] if columns is None else _joined(place, columns.requests, self._infos)


def _joined(
    place: str,
    join: Callable[[Mapping[int, RequestInfo]], list[T]],
    infos: Mapping[int, RequestInfo],
) -> list[T]:
    try:
        return join(infos)
    except (KeyError, IndexError, ValueError) as error:
        raise InputFileError(f"{place}: the columns do not fit together: {error}") from error


def _read_queued(source: str, fields: dict[str, Any]) -> QueuedRequest:
    """Return the offline request of an ``added`` line, whose tokens are a list of ids."""
    request = _read(AddedLine, fields, source).request
    try:
        tokens = pack_tokens(request.get("token_ids", ()))
    except CoserveError as error:
        raise InputFileError(f"{source}: request.token_ids: {error}") from error
    return _read(QueuedRequest, {**request, "token_ids": tokens.hex()}, source, "request")


def _object(source: str, line: str) -> dict[str, Any]:
    try:
        value = from_json(line, allow_inf_nan=False)
    except ValueError as error:
        raise InputFileError(f"{source}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputFileError(f"{source}: expected a JSON object, found {value!r:.40}")
    return value


def _read(kind: type[T], value: object, source: str, path: str = "", *, strict: bool = True) -> T:
    """Return ``value``, which was read from the field ``path``, converted to type ``kind``.

    Raises:
        InputFileError: it does not have that type.
    """
    try:
        # Through JSON, because strict validation makes tuples and dataclasses only from JSON.
        adapter = _adapter(kind, strict=strict)  # type: ignore[arg-type]  # A type is hashable.
        read: tuple[T] = adapter.validate_json(to_json([value]))
    except (ValidationError, CoserveError) as error:
        problem = explain(error) if isinstance(error, ValidationError) else f": {error}"
        place = path + problem.removeprefix("[0]")
        raise InputFileError(f"{source}: {place.lstrip('.: ')}") from error
    return read[0]


@cache
def _adapter(kind: Any, *, strict: bool) -> TypeAdapter[Any]:
    # Wrapped in a tuple, so that the configuration also applies to dataclasses.
    config = ConfigDict(
        strict=strict, allow_inf_nan=not strict, extra="forbid", val_json_bytes="hex"
    )
    return TypeAdapter(tuple[kind], config=config)
