"""The interface of observers of a run, such as the event log and the trace."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

from sglang_coserve.simulator.request import SimRequest

__all__ = ["RequestEvent", "SimulationObserver", "StepRecord"]


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


class StepRecord(NamedTuple):
    """A step that has ended; of a suspended step there is one record for each part."""

    number: int
    """From 0."""

    start_s: float
    end_s: float
    predicted_s: float
    budget_s: float
    """Infinite if no online request bounded it."""

    online_tokens: int
    """Tokens computed and kept, prefill and decode together."""

    offline_tokens: int
    online_running: int
    offline_running: int
    """Requests that hold KV, including paused and parked ones."""

    online_waiting: int
    offline_waiting: int
    held_kv_tokens: int
    """KV slots that requests hold."""

    cached_kv_tokens: int
    """KV slots that only the prefix cache holds."""

    prefills: tuple[tuple[str, int], ...]
    """Chunks whose results were kept: request id and tokens."""

    online_decodes: int
    offline_decodes: int
    is_suspended: bool
    """It was suspended; its tokens are in the record of the part in which it ends."""


class SimulationObserver(Protocol):
    """Receives all events of a run in order of time."""

    def on_request(self, now_s: float, event: RequestEvent, request: SimRequest) -> None:
        """Called for each event of a request."""
        ...

    def on_step(self, record: StepRecord) -> None:
        """Called at the end of each step, before the events of its requests."""
        ...
