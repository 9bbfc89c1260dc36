"""Observers of a run: the event log, and what shows progress and ends it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, TextIO

from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.terminal import StoppableBar


class RequestEvent(Enum):
    """An event in the life of a request."""

    ARRIVED = "arrived"
    RETRACTED = "retracted"
    """Its KV was released; it waits again with its progress."""

    PAUSED = "paused"
    RESUMED = "resumed"
    PARKED = "parked"
    FIRST_TOKEN = "first_token"
    FINISHED = "finished"
    SHED = "shed"
    """Refused: by the scheduler, or because it could never fit the device."""


class SimulationObserver:
    """Receives all events of a run in order of time. Here it ignores them."""

    def on_request(self, now_s: float, event: RequestEvent, request: SimRequest) -> None:
        """Called for each event of a request."""

    def on_step(self, record: Mapping[str, Any]) -> None:
        """Called at the end of each step, before the events of its requests; of a suspended step
        for each part. The fields of ``record`` are those of an iteration in the event log."""


_SCHEMA_VERSION: Final = 1


class EventLog(SimulationObserver):
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

    def on_step(self, record: Mapping[str, Any]) -> None:
        """See ``SimulationObserver``."""
        self._write({"event": "iteration", "t_s": record["end_s"], **record})

    def _write(self, line: Mapping[str, object]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")


class RunControl(StoppableBar):
    """A bar whose ``tick`` says whether the run is to stop."""

    def __init__(
        self,
        time_limit_s: float = math.inf,
        *,
        show: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock.

        Args:
            time_limit_s: Real seconds after which ``tick`` returns True.
            show: Show progress on standard error: a bar on a terminal, otherwise occasional
                lines.
            clock: Real time in seconds.
        """
        super().__init__(show=show, clock=clock)
        self._end_s = clock() + time_limit_s
        self._name = ""
        self._interval_s = math.inf

    @property
    def should_stop(self) -> bool:
        """True after SIGINT or when the time is up."""
        return self.is_interrupted or self._clock() >= self._end_s

    def begin(self, name: str, interval_s: float) -> None:
        """Show a new run, which measures until ``interval_s`` (infinite if unknown)."""
        self._name, self._interval_s = name, interval_s
        total = interval_s if math.isfinite(interval_s) else None
        self._bar.reset(self._task, total=total, description=f"simulating {name}")

    def tick(self, simulated_s: float) -> bool:
        """Show the progress of the run; return True if it should stop."""
        self._show(simulated_s, lambda: self._progress(simulated_s))
        return self.should_stop

    def _progress(self, simulated_s: float) -> str:
        of = ""
        if math.isfinite(self._interval_s):
            of = f" of {self._interval_s:,.0f} ({simulated_s / self._interval_s:.0%})"
        return f"simulating {self._name}: {simulated_s:,.0f}{of} simulated s"
