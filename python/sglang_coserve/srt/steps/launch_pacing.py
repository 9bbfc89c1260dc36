"""Lets the next step be planned shortly before the one that runs ends.

With overlap scheduling SGLang plans a step as soon as the one before it is launched. A request that
arrives a moment later waits for the rest of that step, and then for another one that was planned
without it. Steps with offline work are long, so it waits long. The host has nothing to do
meanwhile. Here it receives and plans at the last moment that still keeps the device busy, and such
a request is in the next step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any, Final

__all__ = ["LaunchPacer", "PacedReceiver"]

_POLL_S: Final = 2e-3
"""Sleep between two looks at the device, which idles so long if the step ends before its time."""

_REMEMBERED: Final = 16
"""Rounds whose largest host time is expected of the next one."""


class LaunchPacer:
    """Waits, before requests are received, until the next step has to be planned.

    It knows when the running step began from the result of the one before it, and its length from
    its plan. A step that was not planned, as without offline work, is followed at once. It is never
    waited longer than the step runs.
    """

    def __init__(self) -> None:
        self._host_s: deque[float] = deque(maxlen=_REMEMBERED)
        """From the reception of requests to the launch of the step, in the last rounds."""

        self.results_s: float | None = None
        """When the last results came; None before any."""

        self._woke_s = 0.0
        self._expected_s = 0.0
        self._early_s = 0.0
        self._ends_s = -math.inf
        """When the step that was launched last is predicted to end."""

        self._in_flight = 0
        self._done: Any = None
        """The device's event at the end of that step; None if it has none."""

    def expects(self, seconds: float, error: float = 0.0) -> None:
        """Note that the step to be launched takes so long, with this mean relative error."""
        self._expected_s, self._early_s = seconds, seconds * error

    def launched(self, result: Any, began_s: float) -> None:
        """Note that a step is in the device's stream; its launch began at ``began_s``."""
        now_s = time.perf_counter()
        self._done = getattr(result, "copy_done", None)
        if self._expected_s:
            self._host_s.append(now_s - self._woke_s)
        self._in_flight += 1
        self._begins(began_s)

    def ended(self, result: Any) -> None:
        """Wait for the oldest step in flight, whose result is to be processed now."""
        if (done := getattr(result, "copy_done", None)) is not None:
            done.synchronize()
        self._in_flight = max(self._in_flight - 1, 0)
        self.results_s = time.perf_counter()
        if self._in_flight:
            self._begins(self.results_s)

    def ahead_s(self, now_s: float) -> float:
        """Return the predicted rest of the running step; 0 if none runs, or it is not known."""
        return max(self._ends_s - now_s, 0.0) if self._in_flight else 0.0

    def wait(self) -> None:
        """Wait until requests are to be received."""
        if self._in_flight and self._host_s and self._done is not None:
            until_s = self._ends_s - self._early_s - max(self._host_s)
            while (left_s := until_s - time.perf_counter()) > 0 and not self._done.query():
                time.sleep(min(left_s, _POLL_S))
        self._woke_s = time.perf_counter()

    def _begins(self, at_s: float) -> None:
        self._ends_s = at_s + self._expected_s if self._expected_s else -math.inf


class PacedReceiver:
    """SGLang's receiver of requests, which waits before it looks for them."""

    def __init__(self, inner: Any, pacer: LaunchPacer) -> None:
        self._inner = inner
        self._pacer = pacer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def recv_requests(self, *args: Any, **options: Any) -> Any:
        """Return the messages that have come."""
        self._pacer.wait()
        return self._inner.recv_requests(*args, **options)
