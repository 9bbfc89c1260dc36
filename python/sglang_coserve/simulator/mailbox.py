"""What one engine of a fleet is sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from sglang_coserve.simulator.observer import RequestEvent, SimulationObserver, StepRecord
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.source import TrafficSource

__all__ = ["Mailbox"]

_ENDS = frozenset({RequestEvent.FINISHED, RequestEvent.SHED})


class Mailbox(TrafficSource, SimulationObserver):
    """The source of an engine to which others send requests; also one of its observers."""

    def __init__(self, timed: Iterable[SimRequest] = ()) -> None:
        """``timed`` are online requests that nobody has to send."""
        super().__init__([timed])
        self._online: deque[SimRequest] = deque()
        self._lines: deque[SimRequest] = deque()
        self.ended: list[SimRequest] = []
        """Lines that have ended in the engine, until somebody has noted it."""

        self.returned: list[SimRequest] = []
        """Lines that it has given back, until somebody has noted it."""

        self.num_online = 0
        """Online requests that were sent and have not ended."""

    @property
    def next_arrival_s(self) -> float:
        """See ``TrafficSource``."""
        next_s = super().next_arrival_s
        return min(next_s, self._online[0].info.arrival_s) if self._online else next_s

    def send_online(self, request: SimRequest) -> None:
        """Let an online request arrive at its time; in order of their times."""
        self._online.append(request)
        self.num_online += 1

    def send_line(self, line: SimRequest) -> None:
        """Let a line arrive with the engine's next step."""
        self._lines.append(line)

    def take_lines(self) -> list[SimRequest]:
        """Remove the lines that have not arrived yet."""
        lines = list(self._lines)
        self._lines.clear()
        return lines

    def take_online(self) -> list[SimRequest]:
        """Remove the sent online requests that have not arrived yet."""
        requests = list(self._online)
        self._online.clear()
        return requests

    def arrived(self, until_s: float) -> Iterator[SimRequest]:
        """See ``TrafficSource``."""
        yield from super().arrived(until_s)
        while self._online and self._online[0].info.arrival_s <= until_s:
            yield self._online.popleft()

    def refill(self, _num_waiting: int, now_s: float) -> Iterator[SimRequest]:
        """See ``TrafficSource``: what was sent, however many wait."""
        while self._lines:
            line = self._lines.popleft()
            if not line.num_admissions:  # Otherwise it has arrived, and comes from elsewhere.
                line.arrive_at(now_s)
            yield line

    def on_request(self, _now_s: float, event: RequestEvent, request: SimRequest) -> None:
        """See ``SimulationObserver``."""
        if event not in _ENDS:
            return
        if request.info.is_online:
            self.num_online -= 1
        else:
            self.ended.append(request)

    def on_step(self, record: StepRecord) -> None:
        """See ``SimulationObserver``."""
