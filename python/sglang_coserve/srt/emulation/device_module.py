"""The emulated device: streams and events, each a time, where SGLang looks for torch's.

Launching work on a stream puts off the time at which the stream is free. Nothing runs meanwhile,
so no thread is needed: who waits for an event waits until its time, on the host's clock, which is
real or virtual.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, Final
from weakref import WeakSet

import torch

from sglang_coserve.srt.forward_kind import EMULATED, is_emulated

_QUERY_S: Final = 1e-6
"""What asking for an event takes on the virtual clock; about what it takes on CUDA. Without it, a
loop that asks until the event has occurred would never end where host work takes no time."""


class HostClock:
    """Tells the host's time in seconds, and lets it pass: the clock on the wall."""

    def __call__(self) -> float:
        """Return the time; ``time.perf_counter`` returns the same."""
        return time.perf_counter()

    def has_come(self, at_s: float) -> bool:
        """Return whether it is ``at_s`` or later."""
        return self() >= at_s

    def wait_until(self, at_s: float) -> None:
        """Return once it is ``at_s``."""
        while (left_s := at_s - self()) > 0:
            time.sleep(left_s)


class VirtualTime(HostClock):
    """The CPU time of one thread, times a factor, and what that thread has skipped.

    It stands still while other work on the machine has the core, and where the thread would wait
    it goes on at once. With a factor of 0 only waiting takes time, and runs repeat exactly.
    For an engine whose scheduler, model and event loop run in one thread: the one that makes it.
    """

    def __init__(self, host_factor: float = 1.0) -> None:
        """``host_factor``: how long a second of CPU time is."""
        self._thread = threading.get_ident()
        self._cpu_clock = time.pthread_getcpuclockid(self._thread)
        self._host_factor = host_factor
        self._skipped_s = 0.0

    def __call__(self) -> float:
        """See ``HostClock``; any thread may ask."""
        if not self._host_factor:
            return self._skipped_s
        return time.clock_gettime(self._cpu_clock) * self._host_factor + self._skipped_s

    def has_come(self, at_s: float) -> bool:
        """See ``HostClock``."""
        if self() >= at_s:
            return True
        self._skipped_s += _QUERY_S
        return False

    def wait_until(self, at_s: float) -> None:
        """See ``HostClock``."""
        self._skipped_s += max(0.0, at_s - self())

    def install(self) -> Callable[[], None]:
        """Be the clock of Python's ``time``, for what looks it up there; return what undoes it.

        Sleeping skips time in this clock's thread, and sleeps in others.
        """
        names = ("perf_counter", "monotonic", "sleep")
        replaced: dict[str, Any] = {name: getattr(time, name) for name in names}

        def sleep(seconds: float) -> None:
            if threading.get_ident() == self._thread:
                self.wait_until(self() + seconds)
            else:
                replaced["sleep"](seconds)

        _set(time, {"perf_counter": self, "monotonic": self, "sleep": sleep})
        return partial(_set, time, replaced)


def _set(module: ModuleType, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(module, name, value)


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

    def __init__(self, emulated: EmulatedDevice) -> None:
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

    def Event(self, *_arguments: object, **_options: object) -> EmulatedEvent:  # noqa: N802
        """Return a new event."""
        return EmulatedEvent(self)

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
    _set(torch.cpu, {**values, EMULATED: emulated})
    return partial(_set, torch.cpu, {**replaced, EMULATED: None})


def emulated_device() -> EmulatedDevice:
    """Return the device of this process; if there is none yet, install one in real time."""
    if not is_emulated():
        install(EmulatedDevice(HostClock()))
    emulated: EmulatedDevice = getattr(torch.cpu, EMULATED)
    return emulated
