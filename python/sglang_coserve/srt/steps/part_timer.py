"""Times the steps of an engine whose host runs ahead of its device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from sglang_coserve.srt.device import runs_beside_host

__all__ = ["DeviceEvent", "PartTimer", "device_timer"]


class DeviceEvent(Protocol):
    """A marker in the stream of the forward passes, such as ``torch.cuda.Event``."""

    def record(self, stream: Any) -> None:
        """Place the marker after all work launched so far."""
        ...

    def query(self) -> bool:
        """Return whether the device has passed the marker."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this marker to a later one, both passed."""
        ...


class PartTimer:
    """Times the parts of steps, where a step that is never suspended has one part.

    A part lasts from the beginning of its pass, or the end of the part before it if that is later,
    to its own end. When the host learns of that does not matter: an armed batch keeps it until the
    batch is nearly over, others do not, and a stopped batch goes on after it.
    """

    def __init__(self, make_event: Callable[[], DeviceEvent], stream: Any) -> None:
        """``stream`` is that of the forward passes; ``make_event`` makes events with times."""
        self._make_event = make_event
        self._stream = stream
        self._begin: DeviceEvent | None = None
        self._parts: deque[tuple[DeviceEvent, DeviceEvent]] = deque()

    def begin_pass(self) -> None:
        """Note that a pass begins, which may launch a part."""
        self._begin = self._mark()

    def launched(self) -> None:
        """Note that all of the part that this pass launches is in the stream."""
        end = self._mark()
        self._parts.append((self._begin or end, end))
        self._begin = None

    def take(self) -> tuple[float, ...]:
        """Take out and return the seconds of the parts that have ended, in order."""
        parts_s = []
        while self._parts and self._parts[0][1].query():
            begin, end = self._parts.popleft()
            parts_s.append(begin.elapsed_time(end) / 1e3)
        return tuple(parts_s)

    def _mark(self) -> DeviceEvent:
        event = self._make_event()
        event.record(self._stream)
        return event


def device_timer(scheduler: Any) -> PartTimer | None:
    """Return a timer of a scheduler's steps; None if its host waits for each of them.

    That is so without overlap scheduling, and on a CPU.
    """
    if not scheduler.enable_overlap or not runs_beside_host(scheduler.device):
        return None
    module = torch.get_device_module(scheduler.device)
    return PartTimer(lambda: module.Event(enable_timing=True), scheduler.forward_stream)
