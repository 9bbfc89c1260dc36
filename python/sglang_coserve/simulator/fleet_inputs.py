"""What engines of a fleet are sent, by which router, and when they are away."""

from __future__ import annotations

import math
import random
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Self

from sglang_coserve.errors import ConfigError
from sglang_coserve.simulator.binding import TrafficSource
from sglang_coserve.simulator.observer import RequestEvent, SimulationObserver, StepRecord
from sglang_coserve.simulator.request import SimRequest

__all__ = ["ROUTER_POLICIES", "Mailbox", "OnlineRouter", "Outage"]

ROUTER_POLICIES: Final = ("round_robin", "random", "power_of_two", "least_load")


class OnlineRouter:
    """Sends each online request to one of the engines that are open."""

    def __init__(self, policy: str, seed: int = 0) -> None:
        """``policy`` is one of ``ROUTER_POLICIES``.

        Raises:
            ConfigError: it is not.
        """
        if policy not in ROUTER_POLICIES:
            raise ConfigError(f"router {policy!r}: use one of {', '.join(ROUTER_POLICIES)}")
        self._policy = policy
        self._rng = random.Random(seed)
        self._num_sent = 0

    def choose(self, engines: Sequence[int], load: Callable[[int], int]) -> int:
        """Return one of ``engines``; ``load`` says how many online requests one has."""
        assert engines
        self._num_sent += 1
        match self._policy:
            case "round_robin":
                return engines[self._num_sent % len(engines)]
            case "random":
                return self._rng.choice(engines)
            case "power_of_two":
                return min(self._rng.choices(engines, k=2), key=load)
            case _:
                return min(engines, key=load)


_FORM: Final = re.compile(r"(\d+)@(\d+(?:\.\d+)?)(?:\+(\d+(?:\.\d+)?))?", re.ASCII)


class Outage(NamedTuple):
    """An engine takes nothing for a while."""

    start_s: float
    engine: int
    end_s: float
    is_death: bool
    """True when what it has is gone; otherwise it drains: its online requests end there."""

    @classmethod
    def parse(cls, text: str, *, is_death: bool) -> Self:
        """Read ``ENGINE@START+SECONDS``; without the seconds it is for good.

        Raises:
            ConfigError: it is something else.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigError(f"outage {text!r}: use ENGINE@START+SECONDS, such as 0@30+60")
        start_s = float(match[2])
        end_s = math.inf if match[3] is None else start_s + float(match[3])
        return cls(start_s, int(match[1]), end_s, is_death)


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
