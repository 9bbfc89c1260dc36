"""Steps as Perfetto shows them: slices for what ran, and a span for each request with marks in it.

The events are in the Trace Event Format. Each event is a line of JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic_core import to_json

from sglang_coserve.srt.monitoring.step_ring import StepDocument


def trace_text(events: Iterable[str]) -> str:
    """Return the file of these events, which may come in any order."""
    return "[\n" + ",\n".join(events) + "\n]\n"


def process_name(name: str, *, process: int) -> str:
    """Return the event that names a process."""
    return _event({"ph": "M", "name": "process_name", "args": {"name": name}}, process)


def trace_events(steps: Sequence[StepDocument], process: int) -> Iterator[str]:
    """Yield the events of the steps of ``StepRing``, as of a process with this number."""
    classes: dict[str, str] = {}
    """The class of each request that begins in these steps."""

    for step in steps:
        # Requests that were aborted leave before the first step that is without them.
        yield from _ends(step["left"], classes, step["begins_s"], process)
        for new in step["new"]:
            classes[new["rid"]] = new["class"]
            args = {"prompt_tokens": new["prompt_tokens"], "batch": new["batch"]}
            yield _mark("b", new["rid"], new["class"], new["arrival_s"], process, args=args)
        for piece in _slices(step):
            yield _event(piece, process)
        ended_s = step["ended_s"]
        for rid in step["first"]:
            if rid in classes:
                yield _mark("n", rid, classes[rid], ended_s, process, name="first_token")
        yield from _ends(step["last"], classes, ended_s, process)


def _ends(rids: Iterable[str], classes: dict[str, str], at_s: float, process: int) -> Iterator[str]:
    for rid in rids:
        if (request_class := classes.pop(rid, None)) is not None:
            yield _mark("e", rid, request_class, at_s, process)


def _mark(
    phase: str, rid: str, request_class: str, at_s: float, process: int, **more: object
) -> str:
    event = {"ph": phase, "name": rid, "ts": _us(at_s), "cat": request_class, "id": rid}
    return _event(event | more, process)


def _slices(step: StepDocument) -> Iterator[dict[str, object]]:
    """Yield an event for each part of a step; a second is a second of the trace."""
    begins_s, layer, name = step["begins_s"], 0, step["kind"] or "other"
    for stop in step["suspensions"]:
        yield _slice(step, _named(name, layer, stopped=True), begins_s, stop["stopped_s"], layer)
        begins_s, layer = stop["resumed_s"], stop["layer"]
    if not step["is_dropped"]:
        yield _slice(step, _named(name, layer, stopped=False), begins_s, step["ended_s"], layer)


def _named(name: str, layer: int, *, stopped: bool) -> str:
    return name + (", resumed" if layer else "") + (", suspended" if stopped else "")


def _slice(
    step: StepDocument, name: str, begins_s: float, ended_s: float, layer: int
) -> dict[str, object]:
    args: dict[str, Any] = {"requests": step["requests"]}
    args |= {key: step[key] for key in ("online", "offline") if step[key]}
    if plan := step["plan"]:
        args["plan"] = plan
    if step["suspensions"]:
        args["from_layer"] = layer
    begins = _us(begins_s)
    return {"ph": "X", "name": name, "ts": begins, "dur": _us(ended_s) - begins, "args": args}


def _event(fields: dict[str, object], process: int) -> str:
    return to_json({"pid": process, "tid": 1, **fields}, ensure_ascii=True).decode()


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
