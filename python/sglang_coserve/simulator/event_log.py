"""The event log: one JSON object per line, byte-identical for equal runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Final, TextIO

from sglang_coserve.simulator.observer import RequestEvent, StepRecord
from sglang_coserve.simulator.request import SimRequest

__all__ = ["EventLog"]

_SCHEMA_VERSION: Final = 1


class EventLog:
    """Writes all events of a run; docs/simulator.md documents the fields.

    Lines are in order of time. An arrival is written when the engine notices it;
    its ``arrival_s`` may be earlier.
    """

    def __init__(self, file: TextIO, run: Mapping[str, object]) -> None:
        """Start the log with a line that describes the run."""
        self._file = file
        self._write({"event": "run", "simulated": True, "schema": _SCHEMA_VERSION, **run})

    def on_request(self, now_s: float, event: RequestEvent, request: SimRequest) -> None:
        """See ``SimulationObserver``."""
        info = request.info
        line: dict[str, object] = {"event": event.value, "t_s": now_s, "rid": info.rid}
        if event is RequestEvent.ARRIVED:
            line |= {
                "class": info.request_class.value,
                "arrival_s": info.arrival_s,
                "prompt_tokens": info.prompt_tokens,
                "output_tokens": request.output_tokens,
            }
        elif event is RequestEvent.FINISHED:
            line |= {
                "output_tokens": request.generated_tokens,
                "cached_prompt_tokens": request.cached_prompt_tokens,
                "recomputed_tokens": request.recomputed_tokens,
            }
        else:
            line["generated_tokens"] = request.generated_tokens
        self._write(line)

    def on_step(self, record: StepRecord) -> None:
        """See ``SimulationObserver``."""
        fields = record._asdict()
        if math.isinf(record.budget_s):
            fields["budget_s"] = None
        self._write({"event": "iteration", "t_s": record.end_s, **fields})

    def _write(self, line: Mapping[str, object]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")
