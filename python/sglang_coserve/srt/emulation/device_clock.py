"""The host's clock beside an emulated device: real time, or a virtual one."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

__all__ = ["HostClock", "RealTime", "VirtualTime"]

_QUERY_S: Final = 1e-6
"""What asking for an event takes on the virtual clock; about what it takes on CUDA. Without it, a
loop that asks until the event has occurred would never end where host work takes no time."""


class HostClock(Protocol):
    """Tells the host's time in seconds, and lets it pass."""

    def __call__(self) -> float:
        """Return the time; ``time.perf_counter`` returns the same."""
        ...

    def has_come(self, at_s: float) -> bool:
        """Return whether it is ``at_s`` or later."""
        ...

    def wait_until(self, at_s: float) -> None:
        """Return once it is ``at_s``."""
        ...


class RealTime:
    """The clock on the wall."""

    def __call__(self) -> float:
        """See ``HostClock``."""
        return time.perf_counter()

    def has_come(self, at_s: float) -> bool:
        """See ``HostClock``."""
        return self() >= at_s

    def wait_until(self, at_s: float) -> None:
        """See ``HostClock``."""
        while (left_s := at_s - self()) > 0:
            time.sleep(left_s)


class VirtualTime:
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
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num_due = 0

    def __call__(self) -> float:
        """See ``HostClock``; any thread may ask."""
        if not self._host_factor:
            return self._skipped_s
        return time.clock_gettime(self._cpu_clock) * self._host_factor + self._skipped_s

    def has_come(self, at_s: float) -> bool:
        """See ``HostClock``."""
        self.run_due()
        if self() >= at_s:
            return True
        self._skipped_s += _QUERY_S
        return False

    def wait_until(self, at_s: float) -> None:
        """See ``HostClock``. What is due until then is run at its time."""
        while self._due and self._due[0][0] <= at_s:
            due_s, _, what = heapq.heappop(self._due)
            self._skip_to(due_s)
            what()
        self._skip_to(at_s)

    def call_at(self, at_s: float, what: Callable[[], None]) -> None:
        """Run ``what`` at ``at_s``, or when the thread next waits or asks for an event.

        So comes what another thread would bring, such as a request.
        """
        self._num_due += 1
        heapq.heappush(self._due, (at_s, self._num_due, what))

    def run_due(self) -> None:
        """Run what is due by now."""
        while self._due and self._due[0][0] <= self():
            heapq.heappop(self._due)[2]()

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

        _set({"perf_counter": self, "monotonic": self, "sleep": sleep})
        return partial(_set, replaced)

    def _skip_to(self, at_s: float) -> None:
        self._skipped_s += max(0.0, at_s - self())


def _set(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(time, name, value)
