"""A run as a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

from typing import Final, Self, TextIO

from sglang_coserve.simulator.observer import RequestEvent, StepRecord
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.trace_events import (
    HEAD,
    SEPARATOR,
    TAIL,
    counter,
    mark,
    process_name,
    slice_of,
    span_begin,
    span_end,
)

__all__ = ["ChromeTrace"]

_ENDS: Final = (RequestEvent.FINISHED, RequestEvent.SHED)


class ChromeTrace:
    """A context manager that writes steps as slices, gauges as counters, requests as spans.

    One simulated second is one second of the trace. Requests that never end have open spans.
    """

    def __init__(self, file: TextIO, name: str) -> None:
        """``name`` becomes the process name, marked as simulated."""
        self._file = file
        self._separator = HEAD
        self._write(process_name(f"simulated: {name}"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.write(TAIL)

    def on_request(self, now_s: float, event: RequestEvent, request: SimRequest) -> None:
        """See ``SimulationObserver``."""
        info = request.info
        rid, kind = info.rid, info.request_class.value
        if event is RequestEvent.ARRIVED:
            lengths = {"prompt_tokens": info.prompt_tokens, "output_tokens": request.output_tokens}
            self._write(span_begin(rid, kind, now_s, lengths))
        elif event in _ENDS:
            self._write(span_end(rid, kind, now_s))
        else:
            self._write(mark(rid, kind, event.value, now_s))

    def on_step(self, record: StepRecord) -> None:
        """See ``SimulationObserver``."""
        kind = "prefill" if record.prefills else "decode"
        name = f"{kind}, suspended" if record.is_suspended else kind
        args = {
            "online_tokens": record.online_tokens,
            "offline_tokens": record.offline_tokens,
            "predicted_ms": record.predicted_s * 1e3,
        }
        self._write(slice_of(name, record.start_s, record.end_s, args))
        for name, values in (
            ("KV tokens", {"held": record.held_kv_tokens, "cached": record.cached_kv_tokens}),
            ("running", {"online": record.online_running, "offline": record.offline_running}),
            ("waiting", {"online": record.online_waiting, "offline": record.offline_waiting}),
        ):
            self._write(counter(name, record.end_s, values))

    def _write(self, event: str) -> None:
        self._file.write(self._separator + event)
        self._separator = SEPARATOR
