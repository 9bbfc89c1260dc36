"""A run as a trace for chrome://tracing or Perfetto (Trace Event Format, JSON array)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self, TextIO

from sglang_coserve.simulator.observer import IterationRecord, RequestEvent
from sglang_coserve.simulator.request import SimRequest

__all__ = ["ChromeTrace"]

_ENDS: Final = (RequestEvent.FINISHED, RequestEvent.SHED)


class ChromeTrace:
    """A context manager that writes steps as slices, gauges as counters, requests as spans.

    One simulated second is one second of the trace. Requests that never end have open spans.
    """

    def __init__(self, file: TextIO, name: str) -> None:
        """``name`` becomes the process name, marked as simulated."""
        self._file = file
        self._separator = "[\n"
        self._write({"ph": "M", "name": "process_name", "args": {"name": f"simulated: {name}"}})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.write("\n]\n")

    def on_request(self, now_s: float, event: RequestEvent, request: SimRequest) -> None:
        """See ``Observer``."""
        info = request.info
        span = {"cat": info.request_class.value, "id": info.rid}
        if event is RequestEvent.ARRIVED:
            lengths = {"prompt_tokens": info.prompt_tokens, "output_tokens": request.output_tokens}
            self._write({"ph": "b", "name": info.rid, "ts": _us(now_s), "args": lengths, **span})
        elif event in _ENDS:
            self._write({"ph": "e", "name": info.rid, "ts": _us(now_s), **span})
        else:
            self._write({"ph": "n", "name": event.value, "ts": _us(now_s), **span})

    def on_iteration(self, record: IterationRecord) -> None:
        """See ``Observer``."""
        kind = "prefill" if record.prefills else "decode"
        start = _us(record.start_s)
        self._write(
            {
                "ph": "X",
                "name": f"{kind}, suspended" if record.is_suspended else kind,
                "ts": start,
                "dur": _us(record.end_s) - start,
                "args": {
                    "online_tokens": record.online_tokens,
                    "offline_tokens": record.offline_tokens,
                    "predicted_ms": record.predicted_s * 1e3,
                },
            }
        )
        for name, values in (
            ("KV tokens", {"held": record.held_kv_tokens, "cached": record.cached_kv_tokens}),
            ("running", {"online": record.online_running, "offline": record.offline_running}),
            ("waiting", {"online": record.online_waiting, "offline": record.offline_waiting}),
        ):
            self._write({"ph": "C", "name": name, "ts": _us(record.end_s), "args": values})

    def _write(self, event: Mapping[str, object]) -> None:
        line = json.dumps({"pid": 1, "tid": 1, **event}, separators=(",", ":"))
        self._file.write(self._separator + line)
        self._separator = ",\n"


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
