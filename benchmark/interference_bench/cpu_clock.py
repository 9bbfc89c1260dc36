"""A clock that stands still while other work on the machine has the core."""

from __future__ import annotations

import time

__all__ = ["CpuClock"]


class CpuClock:
    """The CPU time of the calling thread, and what it has skipped, in seconds.

    For an engine whose scheduler, model and event loop run in one thread. Where it would
    wait for the next arrival it skips the time until then.
    """

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def __call__(self) -> float:
        """Return the time; stands in for ``time.perf_counter``."""
        return time.thread_time() + self._skipped_s

    def skip_to(self, at_s: float) -> None:
        """Let it be ``at_s``, if that has not been."""
        self._skipped_s += max(0.0, at_s - self())

    def install(self) -> None:
        """Be the clock of this process, for what looks it up from now on."""
        time.perf_counter = self
