"""A pot that owners share, fair in tokens: it decides which job may send its next line.

Owners get equal shares, however many jobs they have. An owner's share goes to the job of the
highest priority, among equals to the one with the earliest deadline. Owners have virtual token
counters: the owner with the fewest tokens goes next, and an owner who joins or returns starts level
with the least served, so that idle time earns nothing (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024, section 4.1). Two owners who always wait differ by at most one line's
tokens. A line counts with its estimated tokens while it is in flight, and with its real tokens
afterwards.

A line in flight is never taken back, and may take hours. So the pot has a part for each owner: an
owner with less than a sixteenth of its lines and bytes in flight sends another line at once, even
where others have all of the pot.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from types import MappingProxyType
from typing import Final, Literal

from sortedcontainers import SortedKeyList, SortedSet

LineWait = Literal["slot", "model", "suspect", "engine"]
"""Reason why a line that is next is not in the engine: other lines have the slots; the model is
being exchanged; a line that may have crashed the engine runs alone; an attempt has failed, and the
next one is due later."""

_PARTS: Final = 16
"""An owner's part of a pot is one of so many: 32 of 512 lines, which keep a small batch of an
engine full, and 4 of 64 MiB, which hold lines with an image or two."""


class JobShare:
    """A job that takes slots, and where its lines are."""

    def __init__(self, owner: str, priority: int, deadline_s: float) -> None:
        self.owner = owner
        self.priority = priority
        self.deadline_s = deadline_s
        self.lines_in_flight = 0
        """Lines with a slot."""

        self.lines_in_engine = 0
        self.waits: Counter[LineWait] = Counter()
        """Lines that wait, by reason."""

    @contextmanager
    def waiting(self, reason: LineWait) -> Generator[None]:
        """Count a line that waits within this context."""
        self.waits[reason] += 1
        try:
            yield
        finally:
            self.waits[reason] -= 1

    @contextmanager
    def in_engine(self) -> Generator[None]:
        """Count a line that the engine has within this context."""
        self.lines_in_engine += 1
        try:
            yield
        finally:
            self.lines_in_engine -= 1


@dataclass(slots=True, eq=False)
class Grant:
    """A line that waits for its slot, or has it."""

    job: JobShare
    size_bytes: int
    estimated_tokens: int
    number: int
    granted: asyncio.Future[None]
    is_of_part: bool = False
    """The slot is of the owner's part, not of the common rest."""

    @property
    def turn(self) -> tuple[int, float, int]:
        """Sort key: among the lines of an owner the one with the smallest value goes next."""
        return -self.job.priority, self.job.deadline_s, self.number


_TURN: Final = attrgetter("turn")


@dataclass(slots=True)
class _OwnerShare:
    """What an owner has in flight, has taken so far, and waits for."""

    name: str
    jobs: int = 0
    served: int = 0
    """Tokens of finished lines, plus what levelling has added."""

    tokens_in_flight: int = 0
    """Estimated tokens of the lines in flight."""

    lines: int = 0
    size_bytes: int = 0
    turns: SortedKeyList[Grant] = field(default_factory=lambda: SortedKeyList(key=_TURN))
    """Lines that wait, one of each job."""

    @property
    def taken(self) -> int:
        """Sort key: the owner with the smallest value goes next."""
        return self.served + self.tokens_in_flight

    def next_turn(self) -> Grant | None:
        """Return the line that goes next; None without one."""
        while self.turns and self.turns[0].granted.cancelled():
            del self.turns[0]
        return self.turns[0] if self.turns else None


class _Order:
    """Owners in the order of a number that changes. Every call is O(log n)."""

    def __init__(self) -> None:
        self._keys: dict[str, int] = {}
        self._sorted: SortedSet[tuple[int, str]] = SortedSet()

    def __contains__(self, owner: str) -> bool:
        return owner in self._keys

    def put(self, owner: str, key: int) -> None:
        """Add or move an owner."""
        if self._keys.get(owner) != key:
            self.drop(owner)
            self._keys[owner] = key
            self._sorted.add((key, owner))

    def drop(self, owner: str) -> None:
        """Remove an owner, if it is there."""
        if owner in self._keys:
            self._sorted.remove((self._keys.pop(owner), owner))

    def first(self) -> tuple[int, str] | None:
        """Return the least number and its owner; None if there are no owners."""
        return self._sorted[0] if self._sorted else None


class FairSlots:
    """A pot of ``max_lines`` lines and ``max_bytes`` bytes in flight; a larger line goes alone.

    The parts come on top, and are as large as the pot together. A pot of fewer than 16 lines has
    none. Every call is O(log n) of the owners, and of the jobs of one owner.
    """

    def __init__(self, max_lines: int, max_bytes: int) -> None:
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self.lines_in_flight = 0
        self.bytes_in_flight = 0
        self._part_lines = 0
        self._part_bytes = 0
        """Lines and bytes in flight that have slots of parts."""

        self._jobs: set[JobShare] = set()
        self._owners: dict[str, _OwnerShare] = {}
        """Owners with a job or a line in flight, and former owners who would gain by being
        forgotten."""

        self._waiting = _Order()
        """Owners whose lines wait, by what they have taken."""

        self._in_part = _Order()
        """Owners in ``_waiting`` whose next line has room in their part."""

        self._busy = _Order()
        """Owners whose lines wait or are in flight, by what they were served."""

        self._gone = _Order()
        """Former owners, by what they were served."""

        self._held: Mapping[str, str] = MappingProxyType({})
        self._numbers = count()
        self._is_granting = False

    @property
    def held(self) -> Mapping[str, str]:
        """Owners whose lines are held back, with the reason."""
        return self._held

    def hold(self, owners: Mapping[str, str]) -> None:
        """Hold back the lines of these owners alone; the lines in flight stay."""
        changed = owners.keys() ^ self._held.keys()
        self._held = dict(owners)
        for name in changed & self._owners.keys():
            self._place(self._owners[name])
        self._grant_soon()

    def resize(self, max_lines: int, max_bytes: int | None = None) -> None:
        """Change the pot; the lines in flight stay. O(owners), where anything changes."""
        size = (max_lines, self._max_bytes if max_bytes is None else max_bytes)
        if size == (self._max_lines, self._max_bytes):
            return
        self._max_lines, self._max_bytes = size
        for owner in self._owners.values():
            self._place(owner)
        self._grant_soon()

    def join(self, job: JobShare) -> None:
        """Add a job."""
        self._jobs.add(job)
        owner = self._owners.setdefault(job.owner, _OwnerShare(job.owner))
        owner.jobs += 1
        self._gone.drop(owner.name)
        self._level(owner)

    def leave(self, job: JobShare) -> None:
        """Remove a job; its lines in flight must still be released."""
        self._jobs.remove(job)
        owner = self._owners[job.owner]
        owner.jobs -= 1
        self._forget(owner)

    async def acquire(self, job: JobShare, size_bytes: int, estimated_tokens: int) -> Grant:
        """Wait until ``job`` may send its next line; return the slot, to be released.

        At most one call per job at a time.
        """
        assert job in self._jobs
        owner = self._owners[job.owner]
        self._level(owner)
        granted = asyncio.get_running_loop().create_future()
        turn = Grant(job, size_bytes, estimated_tokens, next(self._numbers), granted)
        owner.turns.add(turn)
        self._place(owner)
        self._grant_soon()
        try:
            with job.waiting("slot"):
                await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                owner.turns.discard(turn)
                self._place(owner)
                self._forget(owner)
                self._grant_soon()
            else:
                self.release(turn, 0)
            raise
        return turn

    def release(self, grant: Grant, tokens: int) -> None:
        """Release the slot of a line that has ended and took ``tokens``."""
        owner = self._owners[grant.job.owner]
        self._count(grant, -1)
        owner.served += tokens
        self._place(owner)
        self._forget(owner)
        self._grant_soon()

    @asynccontextmanager
    async def one(self, job: JobShare, cost: int) -> AsyncGenerator[None]:
        """Wait for the turn of a job that is one piece of work, done within this context.

        ``cost`` stands in for tokens.
        """
        self.join(job)
        try:
            grant = await self.acquire(job, 0, cost)
            try:
                yield
            finally:
                self.release(grant, cost)
        finally:
            self.leave(job)

    def _count(self, grant: Grant, sign: int) -> None:
        """Count a line that begins, or that has ended."""
        owner, size_bytes = self._owners[grant.job.owner], sign * grant.size_bytes
        grant.job.lines_in_flight += sign
        owner.lines += sign
        owner.size_bytes += size_bytes
        owner.tokens_in_flight += sign * grant.estimated_tokens
        self.lines_in_flight += sign
        self.bytes_in_flight += size_bytes
        if grant.is_of_part:
            self._part_lines += sign
            self._part_bytes += size_bytes

    def _level(self, owner: _OwnerShare) -> None:
        """Level the counter of an idle owner with the least served of the busy ones."""
        if owner.name not in self._busy and (least := self._busy.first()) is not None:
            owner.served = max(owner.served, least[0])

    def _place(self, owner: _OwnerShare) -> None:
        """Put an owner where it belongs in every order."""
        name, turn = owner.name, owner.next_turn()
        if turn is None or name in self._held:
            self._waiting.drop(name)
            self._in_part.drop(name)
        else:
            self._waiting.put(name, owner.taken)
            if self._has_part(owner, turn.size_bytes):
                self._in_part.put(name, owner.taken)
            else:
                self._in_part.drop(name)
        if turn is None and not owner.lines:
            self._busy.drop(name)
        else:
            self._busy.put(name, owner.served)

    def _forget(self, owner: _OwnerShare) -> None:
        """Forget owners who have left, except those who would gain by it when they return."""
        if not owner.jobs and not owner.lines:
            self._gone.put(owner.name, owner.served)
        least = self._busy.first()
        while (gone := self._gone.first()) is not None:
            if self._jobs and (least is None or gone[0] > least[0]):
                return
            self._gone.drop(gone[1])
            del self._owners[gone[1]]

    def _grant_soon(self) -> None:
        if not self._is_granting:
            self._is_granting = True
            asyncio.get_running_loop().call_soon(self._grant)

    def _grant(self) -> None:
        """Grant one slot; the next one in a later turn of the event loop.

        By then the job that got this slot can ask for another. Otherwise, when many lines
        end at once, all slots would go to the jobs that happen to be waiting.
        """
        self._is_granting = False
        owner, is_of_part = self._first(self._waiting), False
        if owner is not None and not self._has_room(owner.turns[0].size_bytes):
            # The next owner waits for the common rest, where nobody overtakes.
            owner, is_of_part = self._first(self._in_part), True
            if owner is not None and not self._have_parts_room(owner.turns[0].size_bytes):
                return
        if owner is None:
            return
        grant = owner.turns.pop(0)
        grant.is_of_part = is_of_part
        self._count(grant, 1)
        self._place(owner)
        grant.granted.set_result(None)
        self._grant_soon()

    def _first(self, order: _Order) -> _OwnerShare | None:
        """Return the first owner of ``order``, who has a line that waits."""
        while (found := order.first()) is not None:
            owner = self._owners[found[1]]
            self._place(owner)  # The line that was its next may be waited for no more.
            if order.first() == found:
                return owner
        return None

    def _has_room(self, size_bytes: int) -> bool:
        """Return whether the common rest has room for a line."""
        lines = self.lines_in_flight - self._part_lines
        in_flight_bytes = self.bytes_in_flight - self._part_bytes
        return not lines or (
            lines < self._max_lines and in_flight_bytes + size_bytes <= self._max_bytes
        )

    def _has_part(self, owner: _OwnerShare, size_bytes: int) -> bool:
        """Return whether an owner has so little in flight that its part has room for a line."""
        return (
            owner.lines < self._max_lines // _PARTS
            and owner.size_bytes + size_bytes <= self._max_bytes // _PARTS
        )

    def _have_parts_room(self, size_bytes: int) -> bool:
        """Return whether all parts together have room for a line."""
        return (
            self._part_lines < self._max_lines and self._part_bytes + size_bytes <= self._max_bytes
        )
