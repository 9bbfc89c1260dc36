"""Many engines, with online requests in turn and the lines of a batch from a gateway.

The gateway's decisions are its own (``core.line_placement``), the engines those of every
simulation. What is left out is the network between them: a line is there when it is placed.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from sglang_coserve.core.engine_load import Pool, WantedLines
from sglang_coserve.core.line_placement.engines import LINES_AHEAD, line_window
from sglang_coserve.core.line_placement.placement import LinePlacement, Placed
from sglang_coserve.core.line_placement.pools import LinePools
from sglang_coserve.core.offline_queue import unpack_tokens
from sglang_coserve.jsonl.request_line import prefix_key
from sglang_coserve.simulator.binding import TrafficSource
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.observer import RequestEvent, SimulationObserver
from sglang_coserve.simulator.request import SimRequest

_LOOK_S: Final = 0.5
"""How often the gateway asks for loads."""

_TELLING_TOKENS: Final = 1024
"""Lines are placed by no more of their prompts."""

_ENDS: Final = frozenset({RequestEvent.FINISHED, RequestEvent.SHED})


class Mailbox(TrafficSource, SimulationObserver):
    """The source of an engine that is sent lines; also one of its observers."""

    def __init__(self, online: Iterable[SimRequest] = ()) -> None:
        """``online`` requests arrive at their times, in this order."""
        super().__init__([online])
        self._lines: deque[SimRequest] = deque()
        self.ended: list[SimRequest] = []
        """Lines that have ended in the engine, until somebody has noted it."""

        self.returned: list[SimRequest] = []
        """Lines that it has given back, until somebody has noted it."""

    def send_line(self, line: SimRequest) -> None:
        """Let a line arrive with the engine's next step."""
        self._lines.append(line)

    def refill(self, _num_waiting: int, now_s: float) -> Iterator[SimRequest]:
        """See ``TrafficSource``: what was sent, however many wait."""
        while self._lines:
            line = self._lines.popleft()
            if not line.num_admissions:  # Otherwise it has arrived, and comes from elsewhere.
                line.arrive_at(now_s)
            yield line

    def on_request(self, _now_s: float, event: RequestEvent, request: SimRequest) -> None:
        """See ``SimulationObserver``."""
        if event in _ENDS and not request.info.is_online:
            self.ended.append(request)


class FleetEngine(NamedTuple):
    """An engine whose source, and one of whose observers, is ``mailbox``."""

    engine: SimEngine
    executor: SimulatedExecutor
    mailbox: Mailbox
    pool: Pool | None = None
    """One that is strict puts lines that it retracts into ``mailbox.returned``."""

    wants: Callable[[], WantedLines | None] = lambda: None
    """Returns the lines that a strict one would take over."""


class Fleet:
    """Engines, and one batch for all of them."""

    def __init__(
        self,
        engines: Sequence[FleetEngine],
        lines: Iterable[SimRequest],
        *,
        link_tokens_per_s: float = math.inf,
    ) -> None:
        """Start.

        Args:
            engines: At least one.
            lines: In the order in which the Batch API serves them.
            link_tokens_per_s: How fast the KV of a running line moves between pools.
        """
        self.engines = engines
        self.now_s = 0.0
        self.num_ended = 0
        """Lines that an engine has finished, or can never hold."""

        self.lines_pulled = 0
        """Running lines that strict engines took over."""

        self.lines_returned = 0
        """Lines that they had no room for any more, or none when they came."""

        self.lines_end_s = math.inf
        """Since when no line is left that was not offered to the engines."""

        self._lines = iter(lines)
        self._placement = LinePlacement()
        self._pools = LinePools()
        self._has_pools = any(engine.pool is not None for engine in engines)
        self._where: dict[str, int] = {}
        """The number of the engine that has a line, or had it last."""

        self._link_tokens_per_s = link_tokens_per_s
        self._on_their_way: list[tuple[float, int, SimRequest, int, int]] = []
        """A heap: when a line's KV is there, a number, the line, its KV, the engine's number."""

        self._names = [f"engine-{number}" for number in range(len(engines))]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._windows = [LINES_AHEAD] * len(engines)
        self._inside: dict[str, SimRequest] = {}
        self._idle: set[int] = set()
        self._times = [(0.0, number) for number in range(len(engines))]
        """A heap: when engines have something to do next, some of it out of date."""

        self._next_look_s = 0.0
        for name, engine in zip(self._names, engines, strict=True):
            self._pools.set_engine(name, engine.pool, is_open=True)
        for name in self._names:
            begins_lines = self._pools.begins_lines(name)
            self._placement.set_engine(name, window=LINES_AHEAD, is_open=begins_lines)

    def step(self, end_s: float = math.inf) -> bool:
        """Let the engine that is behind go on; False when nothing is left before ``end_s``."""
        if self.now_s >= self._next_look_s:
            self._look()
            self._next_look_s = self.now_s + _LOOK_S
        self._feed()
        time_s, number = self._next_step()
        kv_s = self._on_their_way[0][0] if self._on_their_way else math.inf
        if min(kv_s, time_s) >= end_s:
            return False
        self.now_s = max(self.now_s, min(kv_s, time_s))
        if kv_s <= time_s:
            while self._on_their_way and self._on_their_way[0][0] <= self.now_s:
                _, _, line, kv_tokens, number = heapq.heappop(self._on_their_way)
                self._deliver(line, kv_tokens, number)
            return True
        engine, _, mailbox = self.engines[number][:3]
        self._idle.discard(number)
        engine.now_s = max(engine.now_s, time_s)
        # No further than now: others may bring an engine without work some at any time.
        if not engine.step(math.nextafter(engine.now_s, math.inf)):
            self._idle.add(number)
        self._expect(number)
        for line in mailbox.ended:
            del self._inside[line.info.rid]
            self.num_ended += 1
            self._pools.stop(line.info.rid)
            self._pools.end(line.info.rid)
            del self._where[line.info.rid]
            self._carry_out(self._placement.end(line.info.rid))
        mailbox.ended.clear()
        for line in mailbox.returned:
            self._return(line)
        mailbox.returned.clear()
        return True

    def _next_step(self) -> tuple[float, int]:
        """Return which engine has something to do next, and when; never is infinite."""
        while self._times:
            time_s, number = self._times[0]
            if time_s == self._time_s(number):
                return time_s, number
            heapq.heappop(self._times)  # Out of date: there is another entry.
        return math.inf, 0

    def _time_s(self, number: int) -> float:
        """Return when an engine has something to do next; infinite for never."""
        engine = self.engines[number].engine
        return engine.next_event_s if number in self._idle else engine.now_s

    def _expect(self, number: int) -> None:
        time_s = self._time_s(number)
        if math.isfinite(time_s):
            heapq.heappush(self._times, (time_s, number))

    def _wake(self, number: int) -> None:
        """Let an engine without work see what it was sent."""
        if number in self._idle:
            self._idle.remove(number)
            engine = self.engines[number].engine
            engine.now_s = max(engine.now_s, self.now_s)
            self._expect(number)

    def _look(self) -> None:
        """Set every window by what runs and waits, as a gateway does."""
        for number, name in enumerate(self._names):
            waiting = len(self.engines[number].executor.offline_waiting)
            window = line_window(self._placement.in_flight(name), waiting)
            self._windows[number] = window
            begins_lines = self._pools.begins_lines(name)
            self._carry_out(self._placement.set_engine(name, window=window, is_open=begins_lines))
        if self._has_pools:
            self._look_at_pools()

    def _look_at_pools(self) -> None:
        """Move running lines to strict engines that want them."""
        for each in self.engines:
            for rid, line in each.executor.admitted.items():
                if line.has_prompt and not line.info.is_online:
                    self._pools.has_prompt(rid, line.computed_tokens)
                    self._pools.add_tokens(rid, 0, self.now_s)
        for number, each in enumerate(self.engines):
            if each.pool != "strict":
                continue
            # What it has no room for it has returned at once.
            for moved, _ in self._pools.look(self._names[number], each.wants(), 0, self.now_s):
                assert isinstance(moved, str)
                self._pull(self._inside[moved], number)

    def _pull(self, line: SimRequest, to: int) -> None:
        rid, now_s = line.info.rid, self.now_s
        number = self._where[rid]
        source = self.engines[number]
        suspended = source.executor.suspended
        self._pools.stop(rid)
        if not line.has_prompt or (suspended is not None and line in suspended.requests):
            # It was retracted meanwhile, or is in the middle of a step: not now.
            self._begin(rid, number)
            return
        _, kv_tokens = source.executor.hand_over(rid)
        source.engine.forget(line)
        self._begin(rid, to)
        _, *others = self._placement.move(rid, self._names[to])
        self._carry_out(others)
        ready_s = max(now_s, source.engine.now_s) + kv_tokens / self._link_tokens_per_s
        heapq.heappush(self._on_their_way, (ready_s, self.lines_pulled, line, kv_tokens, to))
        self.lines_pulled += 1

    def _begin(self, rid: str, number: int) -> None:
        self._where[rid] = number
        self._pools.start(rid, self._names[number], 0, self.now_s)

    def _deliver(self, line: SimRequest, kv_tokens: int, number: int) -> None:
        executor = self.engines[number].executor
        if executor.has_room_for(kv_tokens):
            executor.adopt(line, kv_tokens)
            self._wake(number)
        else:
            self._return(line)

    def _return(self, line: SimRequest) -> None:
        self.lines_returned += 1
        self._pools.stop(line.info.rid)
        # One engine's end says nothing of its lines: nobody shall serve them alone.
        placed = self._placement.offer_again(line.info.rid, engine_died=False)
        assert placed is not None
        self._carry_out(placed)

    def _feed(self) -> None:
        """Offer as many lines as the Batch API would have in flight."""
        if math.isfinite(self.lines_end_s):
            return
        most = sum(self._windows) + LINES_AHEAD * len(self._windows)
        room = max(0, most - len(self._inside))
        lines = list(islice(self._lines, room))
        if len(lines) < room:
            self.lines_end_s = self.now_s
        for line in lines:
            rid = line.info.rid
            self._inside[rid] = line
            prompt = unpack_tokens(line.prompt)[:_TELLING_TOKENS].tolist()
            self._carry_out(self._placement.offer(rid, prefix_key({"prompt": prompt})))

    def _carry_out(self, placed: Iterable[Placed]) -> None:
        for rid, name in placed:
            assert isinstance(rid, str)
            number = self._numbers[name]
            self._begin(rid, number)
            self.engines[number].mailbox.send_line(self._inside[rid])
            self._wake(number)
