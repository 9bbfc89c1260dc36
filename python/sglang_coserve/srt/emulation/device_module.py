"""The emulated device: streams and events, each a time, where SGLang looks for torch's.

Launching work on a stream puts off the time at which the stream is free. Nothing runs meanwhile,
so no thread is needed: who waits for an event waits until its time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final
from weakref import WeakSet

import torch

from sglang_coserve.srt.device import EMULATED, is_emulated
from sglang_coserve.srt.emulation.device_clock import HostClock, RealTime

__all__ = ["EmulatedDevice", "EmulatedEvent", "EmulatedStream", "emulated_device", "install"]

_REPLACED: Final = ("Event", "Stream", "StreamContext", "current_stream", "stream", "synchronize")


class EmulatedStream:
    """A queue of work that runs in order, beside that of other streams."""

    _device: EmulatedDevice
    free_s = 0.0
    """When all that was launched has run, on the host's clock."""

    def __init__(self, emulated: EmulatedDevice) -> None:
        self._device = emulated
        emulated.streams.add(self)

    def launch(self, seconds: float) -> None:
        """Add work that takes so long."""
        self.free_s = max(self._device.clock(), self.free_s) + seconds

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work`` now, on the host; it launches what it takes."""
        work()

    def wait_stream(self, other: EmulatedStream) -> None:
        """Let later work begin after what was launched on ``other`` so far."""
        self.free_s = max(self.free_s, other.free_s)

    def wait_event(self, event: EmulatedEvent) -> None:
        """Let later work begin after the event."""
        self.free_s = max(self.free_s, event.time_s)

    def record_event(self, event: EmulatedEvent | None = None) -> EmulatedEvent:
        """Return the event, by default a new one, that comes after what was launched so far."""
        event = event or EmulatedEvent(self._device)
        event.record(self)
        return event

    def query(self) -> bool:
        """Return whether all that was launched has run."""
        return self._device.clock.has_come(self.free_s)

    def synchronize(self) -> None:
        """Wait until all that was launched has run."""
        self._device.clock.wait_until(self.free_s)


class EmulatedEvent:
    """The moment at which a stream has run what was launched on it; until recorded it is over."""

    def __init__(self, emulated: EmulatedDevice, **_options: object) -> None:
        self._device = emulated
        self.time_s = 0.0

    def record(self, stream: EmulatedStream | None = None) -> None:
        """Let it come after all that was launched on the stream so far."""
        stream = stream or self._device.current_stream()
        self.time_s = max(self._device.clock(), stream.free_s)

    def wait(self, stream: EmulatedStream | None = None) -> None:
        """Let later work of the stream begin after the event."""
        (stream or self._device.current_stream()).wait_event(self)

    def query(self) -> bool:
        """Return whether it has come."""
        return self._device.clock.has_come(self.time_s)

    def synchronize(self) -> None:
        """Wait for it."""
        self._device.clock.wait_until(self.time_s)

    def elapsed_time(self, end: EmulatedEvent) -> float:
        """Return the milliseconds from this event to ``end``."""
        return (end.time_s - self.time_s) * 1e3


class EmulatedDevice:
    """A device with its streams; ``install`` lets it be the one that torch names ``cpu``."""

    def __init__(self, clock: HostClock) -> None:
        self.clock = clock
        self.copy_s_per_token = 0.0
        """What it takes to copy a token's KV to the host's memory or back."""

        self.streams: WeakSet[EmulatedStream] = WeakSet()
        self._default = EmulatedStream(self)
        self._selected = threading.local()

    def Stream(self, *_arguments: object, **_options: object) -> EmulatedStream:  # noqa: N802
        """Return a new stream."""
        return EmulatedStream(self)

    def Event(self, *_arguments: object, **options: object) -> EmulatedEvent:  # noqa: N802
        """Return a new event."""
        return EmulatedEvent(self, **options)

    def current_stream(self, *_device: object) -> EmulatedStream:
        """Return the stream that this thread launches on."""
        selected: EmulatedStream = getattr(self._selected, "stream", self._default)
        return selected

    def stream(self, stream: Any) -> _StreamContext:
        """Return a context, to be entered any number of times, that launches on a stream."""
        return _StreamContext(self, stream)

    StreamContext = stream

    def select(self, stream: EmulatedStream) -> EmulatedStream:
        """Let this thread launch on a stream; return the one before."""
        before = self.current_stream()
        self._selected.stream = stream
        return before

    def synchronize(self, *_device: object) -> None:
        """Wait until all streams have run what was launched."""
        self.clock.wait_until(max(stream.free_s for stream in self.streams))


class _StreamContext:
    """Launches on a stream within it; on the current one if that is None."""

    def __init__(self, emulated: EmulatedDevice, stream: Any) -> None:
        if stream is not None and not isinstance(stream, EmulatedStream):
            # SGLang makes the stream of the forward passes before it loads the model.
            stream.__class__ = EmulatedStream
            stream.__init__(emulated)
        self._device = emulated
        self._stream = stream
        self._before: list[EmulatedStream] = []

    def __enter__(self) -> None:
        stream = self._device.current_stream() if self._stream is None else self._stream
        self._before.append(self._device.select(stream))

    def __exit__(self, *error: object) -> None:
        self._device.select(self._before.pop())


def install(emulated: EmulatedDevice) -> Callable[[], None]:
    """Let a device be the one that torch names ``cpu``; return what undoes it.

    The module's functions are replaced, not the module: SGLang keeps references to it. They are
    all that is replaced of torch's; tensors stay where they are.
    """
    values = {name: getattr(emulated, name) for name in _REPLACED}
    replaced = {name: getattr(torch.cpu, name) for name in _REPLACED}
    _set({**values, EMULATED: emulated})

    def undo() -> None:
        _set({**replaced, EMULATED: None})

    return undo


def _set(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(torch.cpu, name, value)


def emulated_device() -> EmulatedDevice:
    """Return the device of this process; if there is none yet, install one in real time."""
    if not is_emulated():
        install(EmulatedDevice(RealTime()))
    emulated: EmulatedDevice = getattr(torch.cpu, EMULATED)
    return emulated
