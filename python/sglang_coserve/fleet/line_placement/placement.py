"""Gives waiting lines to engines: whole groups of a prefix, and no engine idle while any waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sglang_coserve.fleet.line_placement.engines import Rendezvous
from sglang_coserve.jsonl.request_line import KEY_BLOCK_BYTES

DEATHS_BEFORE_ALONE: Final = 2
"""Engines that may end with a line in them before it is served alone. One end says nothing of
any of the dozens of lines in an engine; two make it worth an engine's time to find out."""


class PrefixGroups:
    """The lines that are there, as a trie of their prefix keys (``jsonl.prefix_key``).

    A group is the largest subtree that one engine can have at a time: where more lines share
    a beginning, those that share more of it are a group, and so on. To divide a subtree
    between n engines costs n - 1 times its prefix, so what fits stays whole.
    """

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def join(self, key: bytes, most_lines: int) -> bytes:
        """Add a line; return its group, a beginning of ``key``. O(blocks of that)."""
        counts = self._counts
        group = b""
        for end in range(KEY_BLOCK_BYTES, len(key) + 1, KEY_BLOCK_BYTES):
            group = key[:end]
            counts[group] = count = counts.get(group, 0) + 1
            if count <= most_lines:
                break
        return group

    def leave(self, group: bytes) -> None:
        """Remove a line that has joined ``group``."""
        counts = self._counts
        for end in range(KEY_BLOCK_BYTES, len(group) + 1, KEY_BLOCK_BYTES):
            counts[group[:end]] -= 1
            if not counts[group[:end]]:
                del counts[group[:end]]


class Placed(NamedTuple):
    """A decision: the engine is to have the line now."""

    line: Hashable
    engine: str


@dataclass(slots=True, eq=False)
class _Line:
    name: Hashable
    key: bytes
    group: bytes
    deaths: int = 0
    queue: dict[Hashable, _Line] | None = None
    engine: _Engine | None = None

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= DEATHS_BEFORE_ALONE


@dataclass(slots=True, eq=False)
class _Engine:
    name: str
    window: int = 0
    is_open: bool = False
    is_for_suspects: bool = False
    """For a suspect, which is or will be in it, and nothing else."""

    in_flight: set[Hashable] = field(default_factory=set)
    queue: dict[Hashable, _Line] = field(default_factory=dict)
    """Lines whose home it is, and those it took over; the first is the next."""

    @property
    def has_room(self) -> bool:
        return self.is_open and not self.is_for_suspects and len(self.in_flight) < self.window


class LinePlacement:
    """The lines that wait, and those that each engine has.

    Every line has a home, by its prefix. Where that is full, it goes to an engine that has
    room, or waits in its home's queue; an engine that has room and an empty queue takes over
    the last group of the longest one (work stealing). A line with which several engines have
    ended is a suspect: it is served alone, in an engine that takes no others meanwhile, and
    when that one ends, too, the line is given up.

    Calls that may lead to decisions return them. Between calls no line but a suspect waits
    while an open engine has room.
    """

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self._engines: dict[str, _Engine] = {}
        self._homeless: dict[Hashable, _Line] = {}
        self._suspects: deque[_Line] = deque()
        self._groups = PrefixGroups()
        self._homes = Rendezvous(())
        self._most_lines = 1

    @property
    def num_waiting(self) -> int:
        """Lines that no engine has."""
        return len(self._lines) - sum(len(e.in_flight) for e in self._engines.values())

    def in_flight(self, engine: str) -> int:
        """Return how many lines an engine has."""
        return len(self._engines[engine].in_flight)

    def set_engine(self, name: str, *, window: int, is_open: bool) -> list[Placed]:
        """Note that an engine takes up to ``window`` lines at a time; none while not open.

        What it has it keeps.
        """
        engine = self._engines.setdefault(name, _Engine(name))
        engine.window = window
        has_changed = engine.is_open != is_open
        engine.is_open = is_open
        self._most_lines = max((e.window for e in self._engines.values() if e.is_open), default=1)
        if has_changed:
            self._find_homes()
        return self._decide()

    def remove_engine(self, name: str) -> None:
        """Forget an engine that is not open and has no line any more."""
        engine = self._engines.pop(name)
        assert not engine.is_open and not engine.in_flight and not engine.queue

    def offer(self, name: Hashable, key: bytes) -> list[Placed]:
        """Add a line that waits, with its prefix key."""
        assert name not in self._lines
        line = _Line(name, key, self._groups.join(key, self._most_lines))
        self._lines[name] = line
        self._queue(line)
        return self._decide()

    def offer_again(self, name: Hashable, *, engine_died: bool) -> list[Placed] | None:
        """Have a line that an engine had wait again; None to give it up, which forgets it.

        ``engine_died``: whether the engine ended with the line in it.
        """
        line = self._lines[name]
        was_alone = line.is_suspect
        self._take_from_engine(line)
        if engine_died and was_alone:
            self._forget(line)
            return None
        line.deaths += engine_died
        self._queue(line)
        return self._decide()

    def move(self, name: Hashable, to: str) -> list[Placed]:
        """Have a line that an engine had go on in another, which need not take others. A line that
        is to be alone, or another one is in ``to``, waits again instead."""
        line, engine = self._lines[name], self._engines[to]
        self._take_from_engine(line)
        placed: list[Placed] = []
        if line.is_suspect or engine.is_for_suspects:
            self._queue(line)
        else:
            self._place(line, engine, placed)
        return placed + self._decide()

    def end(self, name: Hashable) -> list[Placed]:
        """Remove a line: it is finished, or nobody wants it any more."""
        line = self._lines[name]
        if line.engine is not None:
            self._take_from_engine(line)
        elif line.is_suspect:
            self._suspects.remove(line)
        else:
            self._unqueue(line)
        self._forget(line)
        return self._decide()

    def _decide(self) -> list[Placed]:
        placed: list[Placed] = []
        self._place_suspects(placed)
        while free := [engine for engine in self._engines.values() if engine.has_room]:
            engine = next((engine for engine in free if engine.queue), None) or self._take_over()
            if engine is None:
                break
            line = next(iter(engine.queue.values()))
            self._unqueue(line)
            self._place(line, engine, placed)
        return placed

    def _take_over(self) -> _Engine | None:
        """Move lines of the longest queue to an engine with room, which is returned.

        Those are its last group, or half of it where there is no other. None if no line waits.
        """
        longest = max(self._engines.values(), key=lambda engine: len(engine.queue))
        if not longest.queue:
            return None
        lines = list(longest.queue.values())
        group = lines[-1].group
        count = 1
        while count < len(lines) and lines[-1 - count].group == group:
            count += 1
        if count == len(lines):
            count = (count + 1) // 2
        # Where a group goes that its home has no room for follows from it, too.
        order = [self._engines[name] for name in self._homes.order(group)]
        thief = next(engine for engine in order if engine.has_room)
        for line in lines[-count:]:
            self._unqueue(line)
            self._enqueue(line, thief)
        return thief

    def _place_suspects(self, placed: list[Placed]) -> None:
        """Serve the next suspect if its engine is empty; keep an engine as long as there is one."""
        engines = self._engines.values()
        reserved = [engine for engine in engines if engine.is_for_suspects]
        if not self._suspects and not reserved:
            return
        chosen = [e for e in reserved if self._has_suspect(e) or (e.is_open and self._suspects)]
        if self._suspects and not chosen:
            candidates = [engine for engine in engines if engine.is_open]
            chosen = sorted(candidates, key=lambda e: (len(e.in_flight), e.name))[:1]
        if chosen != reserved:
            for engine in engines:
                engine.is_for_suspects = engine in chosen
            self._find_homes()
        for engine in chosen:
            if self._suspects and engine.is_open and not engine.in_flight:
                self._place(self._suspects.popleft(), engine, placed)

    def _has_suspect(self, engine: _Engine) -> bool:
        return any(self._lines[name].is_suspect for name in engine.in_flight)

    def _place(self, line: _Line, engine: _Engine, placed: list[Placed]) -> None:
        line.engine = engine
        engine.in_flight.add(line.name)
        placed.append(Placed(line.name, engine.name))

    def _take_from_engine(self, line: _Line) -> None:
        assert line.engine is not None
        line.engine.in_flight.remove(line.name)
        line.engine = None

    def _queue(self, line: _Line) -> None:
        """Have a line wait where it belongs."""
        if line.is_suspect:
            self._suspects.append(line)
        else:
            self._enqueue(line, self._home(line))

    def _home(self, line: _Line) -> _Engine | None:
        name = self._homes.choose(line.group)
        return None if name is None else self._engines[name]

    def _enqueue(self, line: _Line, engine: _Engine | None) -> None:
        line.queue = self._homeless if engine is None else engine.queue
        line.queue[line.name] = line

    def _unqueue(self, line: _Line) -> None:
        assert line.queue is not None
        del line.queue[line.name]
        line.queue = None

    def _find_homes(self) -> None:
        """Let every line wait where it belongs, now that other engines are open."""
        engines = self._engines.values()
        self._homes = Rendezvous([e.name for e in engines if e.is_open and not e.is_for_suspects])
        queues = [self._homeless, *(engine.queue for engine in engines)]
        for line in [line for queue in queues for line in queue.values()]:
            self._unqueue(line)
            self._enqueue(line, self._home(line))

    def _forget(self, line: _Line) -> None:
        self._groups.leave(line.group)
        del self._lines[line.name]
