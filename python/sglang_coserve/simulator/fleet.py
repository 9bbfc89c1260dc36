"""Many engines, and the lines of a batch that a gateway places on them.

The decisions are the gateway's own (``core.line_placement``), the engines those of every
simulation. What is left out is the network between them: a line is there when it is placed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from sglang_coserve.core.line_placement import LINES_AHEAD, LinePlacement, Placed, line_window
from sglang_coserve.core.offline_queue import unpack_tokens
from sglang_coserve.jsonl.prefix_key import prefix_key
from sglang_coserve.simulator.engine import Engine
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.observer import RequestEvent, SimulationObserver, StepRecord
from sglang_coserve.simulator.request import SimRequest

__all__ = ["Fleet", "FleetEngine", "Mailbox"]

_LOOK_S: Final = 0.5
"""How often the gateway asks for loads."""

_KEY_TOKENS: Final = 1024
"""More do not count in a prefix key."""

_ENDS: Final = frozenset({RequestEvent.FINISHED, RequestEvent.SHED})


class Mailbox(SimulationObserver):
    """What an engine gets of a batch, and which lines have ended in it.

    It is the backlog of the engine's ``Source`` and one of its observers.
    """

    def __init__(self) -> None:
        self._coming: deque[SimRequest] = deque()
        self.ended: list[SimRequest] = []

    def __iter__(self) -> Iterator[SimRequest]:
        return self

    def __next__(self) -> SimRequest:
        if not self._coming:
            raise StopIteration  # For now: more may come.
        return self._coming.popleft()

    def put(self, line: SimRequest) -> None:
        """Let a line arrive with the engine's next step."""
        self._coming.append(line)

    def on_request(self, _now_s: float, event: RequestEvent, request: SimRequest) -> None:
        """See ``SimulationObserver``."""
        if event in _ENDS and not request.info.is_online:
            self.ended.append(request)

    def on_step(self, record: StepRecord) -> None:
        """See ``SimulationObserver``."""


class FleetEngine(NamedTuple):
    """An engine whose source has ``mailbox`` as a backlog without an end of its depth."""

    engine: Engine
    executor: SimulatedExecutor
    mailbox: Mailbox


class Fleet:
    """Engines with online requests of their own, and one batch for all of them."""

    def __init__(
        self, engines: Sequence[FleetEngine], lines: Iterable[SimRequest], *, by_prefix: bool = True
    ) -> None:
        """``lines`` come in the order in which the Batch API serves them."""
        assert engines
        self.engines = engines
        self.now_s = 0.0
        self.num_ended = 0
        """Lines that an engine has finished, or can never hold."""

        self._lines = iter(lines)
        self._placement = LinePlacement(by_prefix=by_prefix)
        self._numbers = {f"engine-{number}": number for number in range(len(engines))}
        self._windows = [LINES_AHEAD] * len(engines)
        self._inside: dict[str, SimRequest] = {}
        self._idle: set[int] = set()
        self._next_look_s = 0.0
        for name in self._numbers:
            self._placement.set_engine(name, window=LINES_AHEAD, is_open=True)

    def step(self, end_s: float = math.inf) -> bool:
        """Let the engine that is behind go on; False when nothing is left before ``end_s``."""
        if self.now_s >= self._next_look_s:
            self._look()
            self._next_look_s = self.now_s + _LOOK_S
        self._feed()
        time_s, number = min((self._time_s(n), n) for n in range(len(self.engines)))
        if not time_s < end_s:
            return False
        self.now_s = max(self.now_s, time_s)
        engine, _, mailbox = self.engines[number]
        self._idle.discard(number)
        engine.now_s = max(engine.now_s, time_s)
        # No further than now: others may bring an engine without work some at any time.
        if not engine.step(math.nextafter(engine.now_s, math.inf)):
            self._idle.add(number)
        for line in mailbox.ended:
            del self._inside[line.info.rid]
            self.num_ended += 1
            self._carry_out(self._placement.end(line.info.rid))
        mailbox.ended.clear()
        return True

    def _time_s(self, number: int) -> float:
        """Return when an engine has something to do next; infinite for never."""
        engine = self.engines[number].engine
        return engine.next_arrival_s if number in self._idle else engine.now_s

    def _look(self) -> None:
        """Set every window by what runs and waits, as a gateway does."""
        for name, number in self._numbers.items():
            waiting = len(self.engines[number].executor.offline_waiting)
            window = line_window(self._placement.in_flight(name), waiting)
            self._windows[number] = window
            self._carry_out(self._placement.set_engine(name, window=window, is_open=True))

    def _feed(self) -> None:
        """Offer as many lines as the Batch API would have in flight."""
        most = sum(self._windows) + LINES_AHEAD * len(self._windows)
        for line in islice(self._lines, max(0, most - len(self._inside))):
            rid = line.info.rid
            self._inside[rid] = line
            prompt = unpack_tokens(line.prompt)[:_KEY_TOKENS].tolist()
            self._carry_out(self._placement.offer(rid, prefix_key({"prompt": prompt})))

    def _carry_out(self, placed: Iterable[Placed]) -> None:
        for rid, name in placed:
            assert isinstance(rid, str)
            number = self._numbers[name]
            engine, _, mailbox = self.engines[number]
            mailbox.put(self._inside[rid])
            if number in self._idle:
                self._idle.remove(number)
                engine.now_s = max(engine.now_s, self.now_s)
