"""Streams and events for copies on a CPU: each stream is a thread that runs its work in order.

They have the interface of ``torch.cuda`` as far as SGLang's cache controller uses it, so that
copies on a CPU are asynchronous as well, with the same possible failures.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["Event", "Stream", "ThreadStream", "current_stream", "device_module"]

logger = logging.getLogger(__name__)


class Stream(Protocol):
    """A queue of work that runs in order."""

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work`` after all work submitted before."""
        ...

    def wait_event(self, event: Event) -> None:
        """Let later work wait for the event."""
        ...


class ThreadStream:
    """A stream with its own thread, which ends with the process.

    Work that raises breaks the stream: no later work is run, and no later event
    occurs, because a failed copy must never count as complete.
    """

    def __init__(self, **_options: object) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the thread, after all work submitted before."""
        self._work.put(work)

    def wait_event(self, event: Event) -> None:
        """Let later work wait for the event."""
        if not event.query():
            self.submit(event.synchronize)

    def wait_stream(self, other: object) -> None:
        """Make later work wait for all work submitted to ``other`` so far.

        A PyTorch stream never has pending work on a CPU.
        """
        if isinstance(other, ThreadStream):
            event = Event()
            event.record(other)
            self.wait_event(event)

    def synchronize(self) -> None:
        """Wait until all work is complete; forever if the stream is broken."""
        event = Event()
        event.record(self)
        event.synchronize()

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            except Exception:
                logger.exception("A KV copy failed: the copy engine stops")
                return


class _CallerStream:
    """The calling thread as a stream, which runs work at once."""

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class Event:
    """An event that occurs when its stream reaches it; unless recorded it counts as occurred."""

    def __init__(self, **_options: object) -> None:
        self._came: threading.Event | None = None
        self._time_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Make the event occur after all work submitted to the stream so far."""
        came = self._came = threading.Event()

        def come() -> None:
            self._time_s = time.perf_counter()
            came.set()

        (stream or current_stream()).submit(come)

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work of ``stream`` wait for the event."""
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Return whether the event has occurred."""
        return self._came is None or self._came.is_set()

    def synchronize(self) -> None:
        """Wait for the event."""
        if self._came is not None:
            self._came.wait()

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to ``end``; both must have occurred."""
        return (end._time_s - self._time_s) * 1e3


_caller_stream = _CallerStream()
_selected = threading.local()


def current_stream() -> Stream:
    """Return the stream selected in this thread; by default the thread itself."""
    selected: Stream = getattr(_selected, "stream", _caller_stream)
    return selected


@contextmanager
def _stream(selected: Stream) -> Iterator[None]:
    previous = current_stream()
    _selected.stream = selected
    try:
        yield
    finally:
        _selected.stream = previous


class _DeviceModule:
    """The part of ``torch.cuda`` that SGLang's cache controller uses."""

    __name__ = "kv_copy_threads"
    Stream = ThreadStream
    Event = Event
    stream = staticmethod(_stream)
    current_stream = staticmethod(current_stream)


device_module = _DeviceModule()
"""Replaces ``torch.cuda`` in SGLang's cache controller."""
