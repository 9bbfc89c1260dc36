"""What a run tells those who watch it: the event log, the trace, the timeline."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

from sglang_coserve.simulator.request import SimRequest

__all__ = ["IterationRecord", "Observer", "RequestEvent"]


class RequestEvent(Enum):
    """What happened to one request at an instant."""

    ARRIVED = "arrived"
    EVICTED = "evicted"
    """Lost its KV; waits again with its progress."""

    PAUSED = "paused"
    RESUMED = "resumed"
    PARKED = "parked"
    FIRST_TOKEN = "first_token"
    FINISHED = "finished"
    SHED = "shed"
    """Refused: by the scheduler, or because it could never fit the device."""


class IterationRecord(NamedTuple):
    """One step, after it ended; of one that was suspended, each part."""

    number: int
    """From 0."""

    start_s: float
    end_s: float
    predicted_s: float
    budget_s: float
    """Infinite when no online request bound it."""

    online_tokens: int
    """Tokens computed and kept, prefill and decode."""

    offline_tokens: int
    online_running: int
    offline_running: int
    """Requests that hold KV, paused and parked ones too."""

    online_waiting: int
    offline_waiting: int
    held_kv_tokens: int
    """KV slots that requests hold."""

    cached_kv_tokens: int
    """KV slots that only the prefix cache holds."""

    prefills: tuple[tuple[str, int], ...]
    """Chunks whose result was kept: request and tokens."""

    online_decodes: int
    offline_decodes: int
    reloaded_tokens: int
    """Tokens copied back from host memory meanwhile."""

    is_suspended: bool
    """It stopped at a safepoint; its tokens are those of the record in which it ends."""


class Observer(Protocol):
    """Is told of everything, in order of time."""

    def on_request(self, now_s: float, event: RequestEvent, request: SimRequest) -> None:
        """Something happened to a request."""
        ...

    def on_iteration(self, record: IterationRecord) -> None:
        """An iteration ended; its requests' events come after it."""
        ...
