"""Gives waiting lines to engines: whole groups of a prefix, and no engine idle while any waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from typing import Final, NamedTuple

from sglang_coserve.fleet.line_placement.prefix_groups import PrefixGroups
from sglang_coserve.fleet.line_placement.rendezvous import Rendezvous

DEATHS_BEFORE_APART: Final = 2
"""Deaths of engines that a line may have caused before it is a suspect. One death says nothing of
any of the dozens of lines in an engine; two make it worth an engine's time to find out."""

INNOCENT_TOKENS: Final = 16
"""Tokens of a line after which the engine's death is not its fault. The first tokens come from the
prompt and a few decodes, where lines that kill engines do it. A line that kills an engine later
does so at once in the next engine, which continues after its tokens."""


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

    has_begun: bool = False
    """True once its engine is known to have it."""

    tokens: int = 0
    """Tokens that its engine has brought."""

    deaths: set[Hashable] = field(default_factory=set)
    """Deaths of engines that it may have caused, proven or not."""

    suspects: _Suspects | None = None

    @property
    def may_kill(self) -> bool:
        """True if its engine's death now may be its fault."""
        return self.has_begun and self.tokens < INNOCENT_TOKENS


@dataclass(slots=True, eq=False)
class _Suspects:
    """Lines of which one may have killed engines: served together, and nothing else beside them."""

    lines: list[_Line]
    engine: _Engine | None = None
    """The engine that is reserved for them."""

    death: Hashable = None
    """The death of the engine that served them, while it is not proven."""


@dataclass(slots=True, eq=False)
class _Engine:
    name: str
    window: int = 0
    is_open: bool = False
    models: Collection[str] = ()
    in_flight: dict[Hashable, _Line] = field(default_factory=dict)
    suspects: _Suspects | None = None
    """The suspects for which it is reserved: it has or will have them, and nothing else."""

    @property
    def takes_lines(self) -> bool:
        return self.is_open and self.suspects is None

    @property
    def has_room(self) -> bool:
        return self.takes_lines and len(self.in_flight) < self.window

    def serves(self, line: _Line) -> bool:
        return line.model is None or line.model in self.models


class LinePlacement:
    """The lines that wait, and the lines that each engine has.

    Every line has a home, by its prefix, among the open engines that have the model or adapter that
    it asks for. If its home is full, the line waits for the home. An engine that has room and an
    empty queue takes over the last group of the longest queue (work stealing).

    A line that is in an engine when the engine dies, and has brought few tokens, may have caused
    the death. A line with ``DEATHS_BEFORE_APART`` deaths waits until they are proven, and then is a
    suspect. Suspects are served in halves. An engine is reserved for one half; if this engine dies
    too, its half is halved again. So one bad line among n costs about log2(n) engines. A line is a
    suspect no longer once it brings ``INNOCENT_TOKENS`` tokens. A suspect that is served alone
    when its engine dies is given up.

    Calls that may lead to decisions return them. Between calls, no line waits while an open engine
    that can serve it has room. Lines that may have killed engines are the exception.
    """

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self._engines: dict[str, _Engine] = {}
        self._queues: dict[tuple[str | None, str | None], dict[Hashable, _Line]] = {}
        """Waiting lines by home and by the name that they ask for; only queues with lines."""

        self._apart: deque[_Suspects] = deque()
        """Suspects that wait for an engine of their own."""

        self._tried: list[_Suspects] = []
        """Suspects whose engine has died, until that is proven."""

        self._unproven: set[Hashable] = set()
        self._groups = PrefixGroups()
        self._homes: dict[str | None, Rendezvous] = {}
        """Engines that begin lines, by the name that lines ask for."""

        self._orders = count()

    @property
    def num_waiting(self) -> int:
        """Lines that no engine has."""
        return len(self._lines) - sum(len(e.in_flight) for e in self._engines.values())

    def in_flight(self, engine: str) -> int:
        """Return how many lines an engine has."""
        return len(self._engines[engine].in_flight)

    def lines_of(self, engine: str) -> list[Hashable]:
        """Return the lines that an engine has."""
        return list(self._engines[engine].in_flight)

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

    def engine_died(self, name: str, death: Hashable, lines: Iterable[Hashable]) -> list[Placed]:
        """Note that an engine seems to have died with some of its lines, which wait again.

        The engine is closed until ``set_engine``. ``death`` is a name for ``prove`` or
        ``withdraw``, of which one must follow.
        """
        engine = self._engines[name]
        engine.is_open = False
        self._unproven.add(death)
        lost = [self._lines[each] for each in lines]
        for line in lost:
            if line.may_kill:
                line.deaths.add(death)
            self._take_from_engine(line)
        suspects = engine.suspects
        if suspects is not None:
            self._release(suspects)
            if any(line.suspects is suspects and death in line.deaths for line in lost):
                suspects.death = death
                self._tried.append(suspects)
            else:
                self._apart.appendleft(suspects)
        self._find_homes()
        for line in lost:
            self._wait(line)
        return self._decide()

    def prove(self, death: Hashable) -> tuple[list[Placed], list[Hashable]]:
        """Note that an engine has died for sure. O(lines).

        Returns the decisions, and the lines that are given up: they are forgotten.
        """
        self._unproven.discard(death)
        given_up: list[Hashable] = []
        for suspects in [each for each in self._tried if each.death == death]:
            self._tried.remove(suspects)
            blamed = [line for line in suspects.lines if death in line.deaths]
            if len(suspects.lines) == 1 and blamed:
                given_up.append(blamed[0].name)
                self._forget(blamed[0])
            else:
                self._halve(suspects.lines)
        blamed = [line for line in self._lines.values() if death in line.deaths]
        self._halve([line for line in blamed if self._is_new_suspect(line)])
        for line in blamed:
            self._wait(line)
        return self._decide(), given_up

    def withdraw(self, death: Hashable) -> list[Placed]:
        """Note that a death was none: the engine had only lost its connection. O(lines)."""
        self._unproven.discard(death)
        for suspects in [each for each in self._tried if each.death == death]:
            self._tried.remove(suspects)
            self._apart.appendleft(suspects)
        for line in [line for line in self._lines.values() if death in line.deaths]:
            line.deaths.remove(death)
            if len(line.deaths) < DEATHS_BEFORE_APART:
                self._acquit(line)
            self._wait(line)
        return self._decide()

    # --- lines ---

    def offer(self, name: Hashable, key: bytes, model: str | None = None) -> list[Placed]:
        """Add a line that waits, with its prefix key, and the name of the model or adapter that it
        asks for; None if any engine will do."""
        assert name not in self._lines
        most = max((e.window for e in self._engines.values() if e.is_open), default=1)
        line = _Line(name, self._groups.join(key, most), model, next(self._orders))
        self._lines[name] = line
        self._wait(line)
        return self._decide()

    def offer_again(self, name: Hashable) -> list[Placed]:
        """Have a line wait again that an engine had, through no fault of either."""
        line = self._lines[name]
        self._take_from_engine(line)
        self._wait(line)
        return self._decide()

    def move(self, name: Hashable, to: str) -> list[Placed]:
        """Have a line that an engine had go on in another, which need not take others. A suspect,
        or a line for an engine that is reserved, waits again instead."""
        line, engine = self._lines[name], self._engines[to]
        self._take_from_engine(line)
        placed: list[Placed] = []
        if line.suspects is not None or engine.suspects is not None:
            self._wait(line)
        else:
            self._place(line, engine, placed)
        return placed + self._decide()

    def began(self, name: Hashable) -> None:
        """Note that the engine which is to have a line has the line."""
        self._lines[name].has_begun = True

    def add_tokens(self, name: Hashable, tokens: int) -> list[Placed]:
        """Note that the engine has brought tokens of a line. O(1) but for a line with deaths."""
        line = self._lines[name]
        line.tokens += tokens
        if not line.deaths or line.tokens < INNOCENT_TOKENS:
            return []
        line.deaths.clear()
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
        line.engine, line.has_begun, line.tokens = engine, False, 0
        engine.in_flight[line.name] = line
        placed.append(Placed(line.name, engine.name))

    def _take_from_engine(self, line: _Line) -> None:
        if line.engine is not None:
            del line.engine.in_flight[line.name]
            line.engine = None

    # --- suspects ---

    def _is_new_suspect(self, line: _Line) -> bool:
        proven = len(line.deaths - self._unproven)
        return line.suspects is None and proven >= DEATHS_BEFORE_APART

    def _halve(self, lines: list[_Line]) -> None:
        """Have suspects wait in two groups."""
        middle = (len(lines) + 1) // 2
        for half in (lines[:middle], lines[middle:]):
            if half:
                self._apart.append(suspects := _Suspects(half))
                for line in half:
                    line.suspects = suspects

    def _acquit(self, line: _Line) -> None:
        """Make a suspect an ordinary line, wherever it is; a group without lines ends."""
        suspects, line.suspects = line.suspects, None
        if suspects is None:
            return
        suspects.lines.remove(line)
        if not suspects.lines:
            self._release(suspects)
            for waiting in (self._apart, self._tried):
                if suspects in waiting:
                    waiting.remove(suspects)

    def _release(self, suspects: _Suspects) -> None:
        """Let the engine that is reserved for suspects take other lines."""
        engine, suspects.engine = suspects.engine, None
        if engine is not None:
            engine.suspects = None
            self._find_homes()

    def _serve_suspects(self, placed: list[Placed]) -> None:
        """Reserve one engine for suspects while there are any; give it them once it is empty."""
        reserved = next((e for e in self._engines.values() if e.suspects is not None), None)
        if reserved is not None and not reserved.is_open and not reserved.in_flight:
            assert reserved.suspects is not None
            self._apart.appendleft(reserved.suspects)
            self._release(reserved.suspects)
            reserved = None
        reserved = reserved or self._reserve()
        if reserved is not None and reserved.suspects is not None and not reserved.in_flight:
            for line in reserved.suspects.lines:
                self._place(line, reserved, placed)

    def _reserve(self) -> _Engine | None:
        """Reserve the emptiest engine that can serve the next suspects; None if there is none.

        Suspects of which no engine has all models are halved.
        """
        is_any_open = any(engine.is_open for engine in self._engines.values())
        passed: list[_Suspects] = []
        found: _Engine | None = None
        while self._apart and found is None:
            suspects = self._apart.popleft()
            able = [
                engine
                for engine in self._engines.values()
                if engine.is_open and all(map(engine.serves, suspects.lines))
            ]
            if able:
                found = min(able, key=lambda each: (len(each.in_flight), each.name))
                found.suspects, suspects.engine = suspects, found
                self._find_homes()
            elif is_any_open and len(suspects.lines) > 1:
                self._halve(suspects.lines)
            else:
                passed.append(suspects)
        self._apart.extendleft(reversed(passed))
        return found

    # --- queues ---

    def _wait(self, line: _Line) -> None:
        """Have a line wait at its home.

        A suspect waits with its group. A line that may have caused too many deaths waits until they
        are proven or withdrawn.
        """
        is_doubtful = len(line.deaths) >= DEATHS_BEFORE_APART
        if line.engine is None and line.queue is None and line.suspects is None and not is_doubtful:
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
            able = [
                engine.name
                for engine in self._engines.values()
                if engine.takes_lines and (model is None or model in engine.models)
            ]
            self._homes[model] = Rendezvous(able)
        return self._homes[model]

    def _find_homes(self) -> None:
        """Give another home to lines that wait for an engine which does not begin them any more.

        Other lines keep theirs. O(lines that move).
        """
        self._homes.clear()
        for home, model in list(self._queues):
            if home is None or home not in self._candidates(model):
                for line in list(self._queues[home, model].values()):
                    self._unqueue(line)
                    self._wait(line)

    def _forget(self, line: _Line) -> None:
        self._acquit(line)
        self._groups.leave(line.group)
        del self._lines[line.name]


def _is_of(group: bytes, line: _Line) -> bool:
    return line.group == group
