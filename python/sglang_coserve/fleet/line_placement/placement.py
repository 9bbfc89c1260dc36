"""Gives waiting lines to engines: whole groups of a prefix, and no engine idle while any waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from typing import Final, NamedTuple

from sglang_coserve.fleet.line_placement.prefix_groups import PrefixGroups
from sglang_coserve.fleet.line_placement.rendezvous import Rendezvous

DEATHS_BEFORE_APART: Final = 2
"""Engines that may die with a line in them before the line is a suspect. One death says nothing of
any of the dozens of lines in an engine; two make it worth an engine's time to find out."""


class Placed(NamedTuple):
    """A decision: the engine is to have the line now."""

    line: Hashable
    engine: str


@dataclass(slots=True, eq=False)
class _Line:
    name: Hashable
    group: bytes
    model: str | None
    """The name that it asks for; None if any engine of the fleet's model will do."""

    order: int
    """Lines that came earlier have lower numbers."""

    engine: _Engine | None = None
    queue: tuple[str | None, str | None] | None = None
    """Key of the queue in which it waits."""

    has_progressed: bool = False
    """True once its engine has brought tokens of it."""

    deaths: set[Hashable] = field(default_factory=set)
    """Deaths of engines that it may have caused."""

    suspects: _Suspects | None = None


@dataclass(slots=True, eq=False)
class _Suspects:
    """Lines of which one may have killed engines. They are served together, and nothing else is
    served beside them."""

    lines: list[_Line]


@dataclass(slots=True, eq=False)
class _Engine:
    name: str
    window: int = 0
    is_open: bool = False
    models: Collection[str] = ()
    in_flight: dict[Hashable, _Line] = field(default_factory=dict)
    suspects: _Suspects | None = None
    """The suspects for which the engine is reserved: it has or will have them, and nothing else."""

    @property
    def has_room(self) -> bool:
        return self.is_open and self.suspects is None and len(self.in_flight) < self.window

    def serves(self, line: _Line) -> bool:
        return line.model is None or line.model in self.models


class LinePlacement:
    """The lines that wait, and the lines that each engine has.

    Every line has a home, by its prefix, among the open engines that have the model or adapter that
    it asks for. A line whose home is full waits there. An engine that has room and an empty queue
    takes over the last group of the longest queue (work stealing).

    An engine that dies makes suspects of the lines that have seen ``DEATHS_BEFORE_APART`` deaths.
    Suspects are served in halves: an engine is reserved for one half of them, and if it dies, too,
    the half is halved again. So one bad line among n costs about log2(n) engines. A line that
    brings tokens is no suspect any more. A single suspect with which its engine dies is given up.

    Calls that may lead to decisions return them. Between calls no line but a suspect waits
    while an open engine that can serve it has room.
    """

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self._engines: dict[str, _Engine] = {}
        self._queues: dict[tuple[str | None, str | None], dict[Hashable, _Line]] = {}
        """Waiting lines by home and by the name that they ask for; only queues with lines."""

        self._apart: deque[_Suspects] = deque()
        """Suspects that wait for an engine of their own."""

        self._groups = PrefixGroups()
        self._homes: dict[str | None, Rendezvous] = {}
        """Candidates by the name that lines ask for."""

        self._orders = count()

    @property
    def num_waiting(self) -> int:
        """Lines that no engine has."""
        return len(self._lines) - sum(len(e.in_flight) for e in self._engines.values())

    def in_flight(self, engine: str) -> int:
        """Return how many lines an engine has."""
        return len(self._engines[engine].in_flight)

    def engine_of(self, line: Hashable) -> str | None:
        """Return the engine that has a line; None while the line waits."""
        engine = self._lines[line].engine
        return None if engine is None else engine.name

    def is_suspect(self, line: Hashable) -> bool:
        """Return whether a line may only be served apart."""
        return self._lines[line].suspects is not None

    # --- engines ---

    def set_engine(
        self, name: str, *, window: int, is_open: bool, models: Collection[str] = ()
    ) -> list[Placed]:
        """Note that an engine takes up to ``window`` lines at a time; none while not open.

        The engine keeps the lines that it has. ``models`` are the names that lines may ask it for:
        its model's, and its adapters'.
        """
        engine = self._engines.setdefault(name, _Engine(name))
        has_changed = (engine.is_open, engine.models) != (is_open, models)
        engine.window, engine.is_open, engine.models = window, is_open, models
        if has_changed:
            self._find_homes()
        return self._decide()

    def remove_engine(self, name: str) -> None:
        """Forget an engine that is not open and has no line any more."""
        engine = self._engines.pop(name)
        assert not engine.is_open and not engine.in_flight

    def engine_died(self, name: str, death: Hashable) -> tuple[list[Placed], list[Hashable]]:
        """Note that an engine has died with all lines in it, which wait again.

        A line of which the engine has brought tokens has not caused the ``death``, which has a name
        for ``withdraw``. The engine is closed until ``set_engine``. Returns the decisions, and the
        lines that are given up: they are forgotten.
        """
        engine = self._engines[name]
        engine.is_open = False
        lines = list(engine.in_flight.values())
        blamed = [line for line in lines if not line.has_progressed]
        for line in lines:
            self._take_from_engine(line)
        given_up = self._judge_suspects(engine, blamed)
        for line in blamed:
            line.deaths.add(death)
        self._suspect([line for line in blamed if line not in given_up])
        self._find_homes()
        for line in lines:
            if line not in given_up:
                self._queue(line)
        return self._decide(), [line.name for line in given_up]

    def withdraw(self, death: Hashable) -> list[Placed]:
        """Note that a death was none: the engine had only lost its connection. O(lines)."""
        for line in list(self._lines.values()):
            if death in line.deaths:
                line.deaths.remove(death)
                if len(line.deaths) < DEATHS_BEFORE_APART:
                    self._acquit(line)
        return self._decide()

    # --- lines ---

    def offer(self, name: Hashable, key: bytes, model: str | None = None) -> list[Placed]:
        """Add a line that waits, with its prefix key, and the name of the model or adapter that it
        asks for; None if any engine will do."""
        assert name not in self._lines
        most = max((e.window for e in self._engines.values() if e.is_open), default=1)
        line = _Line(name, self._groups.join(key, most), model, next(self._orders))
        self._lines[name] = line
        self._queue(line)
        return self._decide()

    def offer_again(self, name: Hashable) -> list[Placed]:
        """Have a line wait again that an engine had, through no fault of either."""
        line = self._lines[name]
        self._take_from_engine(line)
        self._queue(line)
        return self._decide()

    def move(self, name: Hashable, to: str) -> list[Placed]:
        """Have a line that an engine had go on in another, which need not take others. A suspect,
        or a line for an engine that is reserved, waits again instead."""
        line, engine = self._lines[name], self._engines[to]
        self._take_from_engine(line)
        placed: list[Placed] = []
        if line.suspects is not None or engine.suspects is not None:
            self._queue(line)
        else:
            self._place(line, engine, placed)
        return placed + self._decide()

    def progressed(self, name: Hashable) -> list[Placed]:
        """Note that the engine has brought tokens of a line: the line has killed nothing. O(1) but
        for the first tokens of a suspect."""
        line = self._lines[name]
        line.has_progressed = True
        line.deaths.clear()
        if line.suspects is None:
            return []
        self._acquit(line)
        return self._decide()

    def end(self, name: Hashable) -> list[Placed]:
        """Remove a line: it is finished, or nobody wants it any more."""
        line = self._lines[name]
        self._take_from_engine(line)
        self._unqueue(line)
        self._forget(line)
        return self._decide()

    # --- decisions ---

    def _decide(self) -> list[Placed]:
        placed: list[Placed] = []
        self._serve_suspects(placed)
        while self._queues:
            free = [engine for engine in self._engines.values() if engine.has_room]
            if not free:
                break
            line = next((line for each in free if (line := self._next_of(each))), None)
            if line is None and not self._steal({engine.name for engine in free}):
                break
            if line is not None:
                assert line.queue is not None and line.queue[0] is not None
                engine = self._engines[line.queue[0]]
                self._unqueue(line)
                self._place(line, engine, placed)
        return placed

    def _next_of(self, engine: _Engine) -> _Line | None:
        """Return the line that has waited longest for an engine; None if there is none."""
        queues = [self._queues.get((engine.name, name)) for name in (None, *engine.models)]
        first = [next(iter(queue.values())) for queue in queues if queue]
        return min(first, key=lambda line: line.order, default=None)

    def _steal(self, free: Collection[str]) -> bool:
        """Move lines of the longest queue that an engine with room can serve into its own queue.

        The lines are the last group of the queue, or half of the group where there is no other.
        Returns whether there were any.
        """
        queues = sorted(self._queues.items(), key=lambda each: len(each[1]), reverse=True)
        for (_, model), queue in queues:
            group = next(reversed(queue.values())).group
            # The prefix also decides which engine takes over a group for which its home has no
            # room.
            order = self._candidates(model).order(group)
            thief = next((name for name in order if name in free), None)
            if thief is None:
                continue
            is_of_group = partial(_is_of, group)
            lines = list(takewhile(is_of_group, reversed(queue.values())))
            if len(lines) == len(queue):
                lines = lines[: (len(lines) + 1) // 2]
            for line in reversed(lines):
                self._unqueue(line)
                self._enqueue(line, thief)
            return True
        return False

    def _place(self, line: _Line, engine: _Engine, placed: list[Placed]) -> None:
        line.engine, line.has_progressed = engine, False
        engine.in_flight[line.name] = line
        placed.append(Placed(line.name, engine.name))

    def _take_from_engine(self, line: _Line) -> None:
        if line.engine is not None:
            del line.engine.in_flight[line.name]
            line.engine = None

    # --- suspects ---

    def _judge_suspects(self, engine: _Engine, blamed: Sequence[_Line]) -> list[_Line]:
        """Return the single suspect with which an engine has died; halve several suspects.

        Suspects for which the engine was only reserved wait for another engine.
        """
        suspects, engine.suspects = engine.suspects, None
        if suspects is None:
            return []
        if not any(line.suspects is suspects for line in blamed):
            self._apart.appendleft(suspects)
            return []
        if len(suspects.lines) > 1:
            self._halve(suspects)
            return []
        (line,) = suspects.lines
        self._forget(line)
        return [line]

    def _suspect(self, lines: Sequence[_Line]) -> None:
        """Make suspects of the lines with so many deaths that are none yet, and halve them."""
        found = [one for one in lines if len(one.deaths) >= DEATHS_BEFORE_APART]
        found = [line for line in found if line.suspects is None]
        if found:
            self._halve(_Suspects(found))

    def _halve(self, suspects: _Suspects) -> None:
        """Have suspects wait in two groups."""
        lines = suspects.lines
        middle = (len(lines) + 1) // 2
        for half in (lines[:middle], lines[middle:]):
            if half:
                self._apart.append(part := _Suspects(half))
                for line in half:
                    line.suspects = part

    def _acquit(self, line: _Line) -> None:
        """Make a line an ordinary one, wherever it is."""
        self._leave_suspects(line)
        if line.engine is None and line.queue is None:
            self._queue(line)

    def _leave_suspects(self, line: _Line) -> None:
        suspects, line.suspects = line.suspects, None
        if suspects is None:
            return
        suspects.lines.remove(line)
        if suspects.lines:
            return
        if suspects in self._apart:
            self._apart.remove(suspects)
        for engine in self._engines.values():
            if engine.suspects is suspects:
                engine.suspects = None
                self._find_homes()

    def _serve_suspects(self, placed: list[Placed]) -> None:
        """Reserve one engine for suspects while there are any; give it them once it is empty."""
        engine = next((each for each in self._engines.values() if each.suspects is not None), None)
        if engine is None and self._apart:
            engine = self._reserve()
        if engine is None or engine.in_flight or engine.suspects is None:
            return
        if not engine.is_open:
            self._apart.appendleft(engine.suspects)
            engine.suspects = None
            self._find_homes()
            self._serve_suspects(placed)
            return
        for line in engine.suspects.lines:
            self._place(line, engine, placed)

    def _reserve(self) -> _Engine | None:
        """Reserve the emptiest engine that can serve the next suspects."""
        for suspects in list(self._apart):
            able = [
                engine
                for engine in self._engines.values()
                if engine.is_open and all(map(engine.serves, suspects.lines))
            ]
            if able:
                engine = min(able, key=lambda each: (len(each.in_flight), each.name))
                self._apart.remove(suspects)
                engine.suspects = suspects
                self._find_homes()
                return engine
            if len(suspects.lines) > 1 and any(e.is_open for e in self._engines.values()):
                self._apart.remove(suspects)  # No engine has the models of all.
                self._halve(suspects)
        return None

    # --- queues ---

    def _queue(self, line: _Line) -> None:
        """Have a line wait at its home. A suspect waits with its group, wherever that is."""
        if line.suspects is None:
            self._enqueue(line, self._candidates(line.model).choose(line.group))

    def _enqueue(self, line: _Line, home: str | None) -> None:
        line.queue = (home, line.model)
        self._queues.setdefault(line.queue, {})[line.name] = line

    def _unqueue(self, line: _Line) -> None:
        if line.queue is not None:
            queue = self._queues[line.queue]
            del queue[line.name]
            if not queue:
                del self._queues[line.queue]
            line.queue = None

    def _candidates(self, model: str | None) -> Rendezvous:
        """Return the engines that begin lines which ask for a model or adapter."""
        if model not in self._homes:
            self._homes[model] = Rendezvous(
                [
                    engine.name
                    for engine in self._engines.values()
                    if engine.is_open
                    and engine.suspects is None
                    and (model is None or model in engine.models)
                ]
            )
        return self._homes[model]

    def _find_homes(self) -> None:
        """Let every line wait where it belongs, now that other engines are open. O(waiting)."""
        self._homes.clear()
        waiting = [line for queue in self._queues.values() for line in queue.values()]
        self._queues.clear()
        for line in sorted(waiting, key=lambda each: each.order):
            self._queue(line)

    def _forget(self, line: _Line) -> None:
        self._leave_suspects(line)
        self._groups.leave(line.group)
        del self._lines[line.name]


def _is_of(group: bytes, line: _Line) -> bool:
    return line.group == group
