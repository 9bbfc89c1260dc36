"""Shows a simulation's progress and ends it early: Ctrl-C, or a limit on real time."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Final

from sglang_coserve.progress_bar import StoppableBar, progress_bar

__all__ = ["RunControl"]

_LINE_INTERVAL_S: Final = 10.0
"""Interval of progress lines, as in ``coserve submit``."""


class RunControl(StoppableBar):
    """A bar whose ``tick`` says whether the run is to stop."""

    def __init__(
        self,
        time_limit_s: float = math.inf,
        *,
        show: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock.

        Args:
            time_limit_s: Real seconds after which ``tick`` returns True.
            show: Show progress on standard error: a bar on a terminal, otherwise occasional
                lines.
            clock: Real time in seconds.
        """
        super().__init__(progress_bar(show=show), "")
        self._clock = clock
        self._end_s = clock() + time_limit_s
        self._writes_lines = show and self._bar.disable
        self._line_s = clock()
        self._name = ""
        self._interval_s = math.inf

    @property
    def should_stop(self) -> bool:
        """True after SIGINT or when the time is up."""
        return self.is_interrupted or self._clock() >= self._end_s

    def begin(self, name: str, interval_s: float) -> None:
        """Show a new run, which measures until ``interval_s`` (infinite if unknown)."""
        self._name, self._interval_s = name, interval_s
        total = interval_s if math.isfinite(interval_s) else None
        self._bar.reset(self._task, total=total, description=f"simulating {name}")

    def tick(self, simulated_s: float) -> bool:
        """Show the progress of the run; return True if it should stop."""
        self._bar.update(self._task, completed=simulated_s)
        if self._writes_lines and self._clock() >= self._line_s + _LINE_INTERVAL_S:
            self._line_s = self._clock()
            of = ""
            if math.isfinite(self._interval_s):
                of = f" of {self._interval_s:,.0f} ({simulated_s / self._interval_s:.0%})"
            sys.stderr.write(f"simulating {self._name}: {simulated_s:,.0f}{of} simulated s\n")
            sys.stderr.flush()
        return self.should_stop
