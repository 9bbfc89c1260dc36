"""Runs several policies on the same workload and machine, one after the other."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final, TextIO

from sglang_coserve.simulator.observer import (
    RequestEvent,
    RunControl,
    SimulationObserver,
    StepRecord,
)
from sglang_coserve.simulator.options import SimulationOptions
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import simulate

__all__ = ["EventLog", "compare"]


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

    def on_step(self, record: StepRecord) -> None:
        """See ``SimulationObserver``."""
        fields = record._asdict()
        if math.isinf(record.budget_s):
            fields["budget_s"] = None
        self._write({"event": "iteration", "t_s": record.end_s, **fields})

    def _write(self, line: Mapping[str, object]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")


def compare(
    options: SimulationOptions,
    directory: Path,
    control: RunControl,
    *,
    event_log: bool = False,
) -> list[SimulationResult]:
    """Run every policy of ``options``; event logs go to files in ``directory``.

    Returns:
        The results in the order of the policies, of which the last may be incomplete;
        empty if there was no time for any.

    Raises:
        CoserveError: an option or a file cannot be used.
        OSError: the directory cannot be written.
    """
    runs = [(policy, options.setup(policy.name)) for policy in options.policies()]
    workload = options.workload()
    directory.mkdir(parents=True, exist_ok=True)
    results: list[SimulationResult] = []
    for policy, setup in runs:
        if control.should_stop:
            break
        control.begin(policy.name, workload.interval_s)
        with ExitStack() as files:
            observers: list[SimulationObserver] = []
            if event_log:
                log = files.enter_context((directory / f"events-{policy.name}.jsonl").open("w"))
                observers.append(
                    EventLog(log, {"policy": policy.name, "settings": options.to_dict()})
                )
            results.append(
                simulate(workload, setup, policy, observers=observers, on_progress=control.tick)
            )
    return results
