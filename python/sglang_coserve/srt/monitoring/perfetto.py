"""The events of a trace for chrome://tracing or Perfetto (Trace Event Format, JSON array).

Slices for what ran, and a span for each request with marks in it. Each event is a line of JSON;
``trace_text`` makes them a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic_core import to_json

__all__ = ["mark", "process_name", "slice_of", "span_begin", "span_end", "trace_text"]


def trace_text(events: Iterable[str]) -> str:
    """Return the file of these events, which may come in any order."""
    return "[\n" + ",\n".join(events) + "\n]\n"


def process_name(name: str, *, process: int = 1) -> str:
    """Return the event that names what the others are of."""
    return _event({"ph": "M", "name": "process_name", "args": {"name": name}}, process)


def slice_of(
    name: str, start_s: float, end_s: float, args: Mapping[str, object], *, process: int = 1
) -> str:
    """Return something that lasted; a second is a second of the trace."""
    start = _us(start_s)
    event = {"ph": "X", "name": name, "ts": start, "dur": _us(end_s) - start, "args": args}
    return _event(event, process)


def span_begin(
    rid: str, kind: str, at_s: float, args: Mapping[str, object], *, process: int = 1
) -> str:
    """Return the beginning of a request's span; one that has no end stays open."""
    event = {"ph": "b", "name": rid, "ts": _us(at_s), "args": args, "cat": kind, "id": rid}
    return _event(event, process)


def mark(rid: str, kind: str, name: str, at_s: float, *, process: int = 1) -> str:
    """Return what happened to a request at an instant."""
    return _event({"ph": "n", "name": name, "ts": _us(at_s), "cat": kind, "id": rid}, process)


def span_end(rid: str, kind: str, at_s: float, *, process: int = 1) -> str:
    """Return the end of a request's span."""
    return _event({"ph": "e", "name": rid, "ts": _us(at_s), "cat": kind, "id": rid}, process)


def _event(fields: Mapping[str, object], process: int) -> str:
    return to_json({"pid": process, "tid": 1, **fields}, ensure_ascii=True).decode()


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
