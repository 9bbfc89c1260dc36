"""The clocks of an engine: one for all ranks, one for steps on its device, one for the next launch.

Rank 0's time is sent with the broadcast of requests: ranks with different clocks would make
different decisions, and hang in the next collective operation. Steps are timed by the device where
the host runs ahead of it.

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch

from sglang_coserve.srt.marks.offline_marks import mark_arrival, marked_arrival_s
from sglang_coserve.srt.marks.request_marks import arrival_s

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

    def __init__(self, waits: Callable[[bool, bool], bool]) -> None:
        """``waits`` says whether a launch waits for the step before, as it reads from the device.

        It is asked whether the step has prefills, and whether it is a CUDA graph. To count such a
        wait as work of the host would be to plan earlier and earlier, and to wait longer and
        longer.
        """
        self._waits = waits
        self._host_s: deque[float] = deque(maxlen=_REMEMBERED)
        """From the reception of requests to the launch of the step, in the last rounds."""

        self._launches_s: deque[float] = deque(maxlen=_REMEMBERED)
        """What the last launches took that wait for the step before; the shortest did not wait."""

        self._has_waited = False
        """Whether the last launch was one of these."""

        self.results_s: float | None = None
        """When the last results came; None before any."""

        self._woke_s = 0.0
        self.paced_s = 0.0
        """Length of the last wait before requests were received, in seconds."""

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

    def launched(self, result: Any, began_s: float, *, has_prefills: bool) -> None:
        """Note that a step is in the device's stream; its launch began at ``began_s``."""
        now_s = time.perf_counter()
        self._done = getattr(result, "copy_done", None)
        self._has_waited = self._waits(has_prefills, result.can_run_cuda_graph)
        if self._expected_s:
            self._host_s.append((began_s if self._has_waited else now_s) - self._woke_s)
            if self._has_waited:
                self._launches_s.append(now_s - began_s)
                began_s = now_s - min(self._launches_s)
        self._in_flight += 1
        self._begins(began_s)

    def waited(self, seconds: float) -> None:
        """Note a wait for the device between planning and launching: it is no work of the host."""
        self._woke_s += seconds

    def ended(self, result: Any) -> None:
        """Wait for the oldest step in flight, whose result is to be processed now."""
        began_s = time.perf_counter()
        if (done := getattr(result, "copy_done", None)) is not None:
            done.synchronize()
        self._in_flight = max(self._in_flight - 1, 0)
        self.results_s = time.perf_counter()
        self.waited(self.results_s - began_s)
        if self._in_flight and not self._has_waited:
            self._begins(self.results_s)

    def ahead_s(self, now_s: float) -> float:
        """Return the predicted rest of the running step; 0 if none runs, or it is not known."""
        return max(self._ends_s - now_s, 0.0) if self._in_flight else 0.0

    def wait(self) -> None:
        """Wait until requests are to be received."""
        began_s = time.perf_counter()
        if self._in_flight and self._host_s and self._done is not None:
            until_s = self._ends_s - self._early_s - max(self._host_s)
            while (left_s := until_s - time.perf_counter()) > 0 and not self._done.query():
                time.sleep(min(left_s, _POLL_S))
        self._woke_s = time.perf_counter()
        self.paced_s = self._woke_s - began_s

    def _begins(self, at_s: float) -> None:
        self._ends_s = at_s + self._expected_s if self._expected_s else -math.inf


Event = Any
"""A marker in a stream of the device, such as ``torch.cuda.Event``."""


class PartTimer:
    """Times the parts of steps, where a step that is never suspended has one part.

    A part lasts from the beginning of its pass, or the end of the part before it if that is later,
    to its own end. When the host learns of that does not matter: an armed batch keeps it until the
    batch is nearly over, others do not, and a stopped batch goes on after it.
    """

    def __init__(self, make_event: Callable[[], Event], stream: Any) -> None:
        """``stream`` is that of the forward passes; ``make_event`` makes events with times."""
        self._make_event = make_event
        self._stream = stream
        self._begin: Event | None = None
        self._parts: deque[tuple[Event, Event]] = deque()

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

    def _mark(self) -> Event:
        event = self._make_event()
        event.record(self._stream)
        return event


def device_timer(scheduler: Any) -> PartTimer:
    """Return a timer of a scheduler's steps; its host runs ahead."""
    module = torch.get_device_module(scheduler.device)
    return PartTimer(lambda: module.Event(enable_timing=True), scheduler.forward_stream)


Req = Any


@dataclass(frozen=True, slots=True)
class RankTime:
    """The time on rank 0 at the start of a step."""

    now_s: float
    parts_s: tuple[float, ...] = ()
    """Times of the parts of steps that have ended on rank 0 since the last time, in order."""

    ahead_s: float = 0.0
    """Predicted rest of the step that runs, in seconds."""

    results_s: float | None = None
    """When the last results came, if the host has waited since then."""


class RankClock:
    """The clock for a rank's decisions and for arrival times, in seconds.

    It is ``time.perf_counter`` of rank 0 if the clock is shared, else of this rank.
    """

    def __init__(self, *, is_shared: bool, is_source: bool) -> None:
        """``is_shared``: all ranks use rank 0's time; ``is_source``: this is rank 0."""
        self._is_shared = is_shared
        self.is_source = is_source
        """Whether this is the rank whose time it is."""

        self._tick: RankTime | None = None
        self._parts_s: list[float] = []
        self.timer: PartTimer | None = None
        """Times the steps of the source, if its host runs ahead of its device."""

        self.pacer: LaunchPacer | None = None
        """Paces the source's host, if it runs ahead of its device."""

    def carried_by(self, input_blocker: Any) -> Any:
        """Return a wrapper of SGLang's input blocker that adds ticks to the broadcast."""
        if not self._is_shared:
            return input_blocker
        return SimpleNamespace(handle=partial(self._carry, input_blocker))

    def _carry(self, inner: Any, received: list[Any] | None) -> list[Any] | None:
        """Return the received messages; on rank 0 with arrival times in them, after a tick."""
        if inner is not None:
            received = inner.handle(received)
        if not self.is_source or received is None:
            return received
        now_s = time.perf_counter()
        for request in _requests(received):
            mark_arrival(request, arrival_s(request, now_s))
        return [self.measured(now_s), *received]

    def take(self, tick: RankTime) -> None:
        """Use the time of a tick from now on."""
        self._tick = tick
        self._parts_s += tick.parts_s

    def measured(self, now_s: float) -> RankTime:
        """Return what this rank knows at ``now_s``, and take out the parts that have ended."""
        parts_s = () if self.timer is None else self.timer.take()
        if self.pacer is None:
            return RankTime(now_s, parts_s)
        return RankTime(now_s, parts_s, self.pacer.ahead_s(now_s), self.pacer.results_s)

    def timed(self, launch: Callable[[], Any], *, has_prefills: bool) -> Any:
        """Call what launches a part of a step, and note that it is launched; return its result."""
        began_s = time.perf_counter()
        try:
            result = launch()
        finally:
            if self.timer is not None:
                self.timer.launched()
        if self.pacer is not None:
            self.pacer.launched(result, began_s, has_prefills=has_prefills)
        return result

    def waited(self, seconds: float) -> None:
        """Note a wait for copies, which is no work of the host."""
        if self.pacer is not None:
            self.pacer.waited(seconds)

    @property
    def paced_s(self) -> float:
        """Seconds for which pacing has held back what is launched next; 0 on ranks not paced."""
        return 0.0 if self.pacer is None else self.pacer.paced_s

    def read(self) -> RankTime:
        """Return the time, and what has become known since it was read last."""
        if self._tick is None:
            return self.measured(time.perf_counter())
        parts_s, self._parts_s = tuple(self._parts_s), []
        return replace(self._tick, parts_s=parts_s)

    def now_s(self) -> float:
        """Return the current time: that of the last tick, if the clock is shared."""
        return time.perf_counter() if self._tick is None else self._tick.now_s

    def arrival_s(self, req: Req, now_s: float) -> float:
        """Return when a request arrived at the server; ``now_s`` if unknown.

        If the clock is shared, the request itself brings the time along from rank 0: it may be
        queued long after its broadcast, as when its grammar was being compiled.
        """
        if self._tick is None:
            return arrival_s(req, now_s)
        marked_s = marked_arrival_s(req)
        return now_s if marked_s is None else marked_s


def _requests(received: list[Any]) -> list[Any]:
    """Return the messages that are requests, including those inside of batch messages."""
    flat = [one for item in received for one in getattr(item, "batch", None) or (item,)]
    return [item for item in flat if getattr(item, "sampling_params", None) is not None]
