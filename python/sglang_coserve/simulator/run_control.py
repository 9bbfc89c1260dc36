"""Shows a simulation's progress and ends it early: Ctrl-C, or a limit on real time."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Self

from sglang_coserve.interrupts import StopOnInterrupt
from sglang_coserve.progress_bar import progress_bar

__all__ = ["RunControl"]


class RunControl:
    """A context whose ``tick`` tells a run whether to stop.

    The first SIGINT asks for a stop, a second one interrupts as usual. Only
    the main thread may enter it.
    """

    def __init__(self, time_limit_s: float = math.inf, *, show: bool = True) -> None:
        """``show`` draws a bar on standard error if that is a terminal."""
        self._stop = StopOnInterrupt()
        self._end_s = time.monotonic() + time_limit_s
        self._bar = progress_bar(show=show)
        self._task = self._bar.add_task("")
        self._interval_s = math.inf

    def __enter__(self) -> Self:
        self._stop.__enter__()
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
        self._stop.__exit__(kind, error, traceback)

    @property
    def is_interrupted(self) -> bool:
        """True after SIGINT."""
        return self._stop.is_interrupted

    @property
    def should_stop(self) -> bool:
        """True after SIGINT or when the time is up."""
        return self.is_interrupted or time.monotonic() >= self._end_s

    def begin(self, name: str, interval_s: float) -> None:
        """Show a new run, which measures until ``interval_s`` (infinite: not known)."""
        total = interval_s if math.isfinite(interval_s) else None
        self._bar.reset(self._task, total=total, description=f"simulating {name}")

    def tick(self, simulated_s: float) -> bool:
        """Show how far the run is; True when it should stop."""
        self._bar.update(self._task, completed=simulated_s)
        return self.should_stop
