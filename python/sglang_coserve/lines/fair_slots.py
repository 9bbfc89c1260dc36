"""A pot that owners share, fair in tokens: it decides which job may send its next line.

Owners get equal shares, however many jobs they have. An owner's share goes to the job with the
highest priority. Jobs of equal priority go by the earliest deadline. Owners have virtual token
counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, section 4.1):

- The owner with the fewest tokens goes next. Two owners who always wait differ by at most one
  line's tokens.
- A line counts with its estimated tokens while it is in flight, and with its real tokens
  afterwards.
- A line with the bytes of N lines counts with at least N times the mean tokens of a line. Large
  lines with few tokens could fill the pot otherwise (dominant shares: Ghodsi et al., "Dominant
  Resource Fairness", NSDI 2011).
- Idle time earns nothing: an owner who begins to wait, or is held no longer, starts level with the
  owners who are being served.

A line in flight is never taken back, and may take hours. So the pot has a part for each owner: an
owner with less than a sixteenth of the pot's lines and bytes in flight sends another line at once,
even where others have all of the pot.
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

_MEAN_LINES: Final = 64
"""How many lines the mean tokens of a line are taken over: an eighth of a pot of 512."""

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
    byte_tokens: int
    """Tokens of N mean lines, for a line with the bytes of N lines."""

    tokens: int
    """Tokens that the line counts with while it is in flight."""

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
    """Tokens and lines of one owner: served, in flight, and waiting."""

    jobs: int = 0
    served_tokens: int = 0
    """Tokens of the lines that have ended, plus what levelling has added."""

    tokens: int = 0
    lines: int = 0
    size_bytes: int = 0
    """Tokens, lines and bytes in flight."""

    turns: SortedKeyList[Grant] = field(default_factory=lambda: SortedKeyList(key=_TURN))
    """Lines that wait, one of each job."""

    @property
    def counter(self) -> int:
        """The virtual token counter: the owner with the smallest one goes next."""
        return self.served_tokens + self.tokens


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

    def first(self) -> str | None:
        """Return the owner with the least number; None if there are no owners."""
        return self._sorted[0][1] if self._sorted else None


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
        """Owners with a job or a line in flight, and those in ``_ahead``."""

        self._waiting = _Order()
        """Owners who wait and may be served, by their counters: the first one goes next."""

        self._in_part = _Order()
        """Waiting owners whose next line has room in their part. While the common rest is full,
        the first one goes next."""

        self._ahead = _Order()
        """Former owners, by the tokens that they were served. An owner is remembered while these
        are more than a newcomer starts with, so that nobody gains by leaving."""

        self._mean_tokens = 0.0
        """Mean tokens of the lines that have ended lately."""

        self._last_served_tokens = 0
        """Served tokens of the owner who got the last slot of the common rest, before that
        slot."""

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
            self._place(name)
        self._grant_soon()

    def resize(self, max_lines: int, max_bytes: int | None = None) -> None:
        """Change the pot; the lines in flight stay. O(owners), where anything changes."""
        size = (max_lines, self._max_bytes if max_bytes is None else max_bytes)
        if size == (self._max_lines, self._max_bytes):
            return
        self._max_lines, self._max_bytes = size
        for name in self._owners:
            self._place(name)
        self._grant_soon()

    def join(self, job: JobShare) -> None:
        """Add a job."""
        self._jobs.add(job)
        self._owners.setdefault(job.owner, _OwnerShare()).jobs += 1
        self._ahead.drop(job.owner)

    def leave(self, job: JobShare) -> None:
        """Remove a job; its lines in flight must still be released."""
        self._jobs.remove(job)
        self._owners[job.owner].jobs -= 1
        self._forget(job.owner)

    async def acquire(self, job: JobShare, size_bytes: int, estimated_tokens: int) -> Grant:
        """Wait until ``job`` may send its next line; return the slot, to be released.

        At most one call per job at a time.
        """
        assert job in self._jobs
        turns = self._owners[job.owner].turns
        granted = asyncio.get_running_loop().create_future()
        byte_tokens = round(size_bytes / self._max_bytes * self._max_lines * self._mean_tokens)
        tokens = max(estimated_tokens, byte_tokens)
        turn = Grant(job, size_bytes, byte_tokens, tokens, next(self._numbers), granted)
        turns.add(turn)
        self._place(job.owner)
        self._grant_soon()
        try:
            with job.waiting("slot"):
                await granted
        except asyncio.CancelledError:
            if turn in turns:
                turns.remove(turn)
                self._place(job.owner)
                self._grant_soon()
            else:
                self._end(turn, 0)
            raise
        return turn

    def release(self, grant: Grant, tokens: int) -> None:
        """Release the slot of a line that has ended and took ``tokens``."""
        self._mean_tokens += (tokens - self._mean_tokens) / _MEAN_LINES
        self._end(grant, max(tokens, grant.byte_tokens))

    def _end(self, grant: Grant, tokens: int) -> None:
        """Release a slot that costs its owner ``tokens``."""
        name = grant.job.owner
        self._count(grant, -1)
        self._owners[name].served_tokens += tokens
        self._place(name)
        self._forget(name)
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
        owner.tokens += sign * grant.tokens
        self.lines_in_flight += sign
        self.bytes_in_flight += size_bytes
        if grant.is_of_part:
            self._part_lines += sign
            self._part_bytes += size_bytes

    def _place(self, name: str) -> None:
        """Put an owner where it belongs among those who wait; level it if it was not there."""
        owner = self._owners[name]
        if not owner.turns or name in self._held:
            self._waiting.drop(name)
            self._in_part.drop(name)
            return
        if name not in self._waiting:
            # Estimates that are given back when lines end put an owner behind, and it may ask for
            # the next slot a moment later: it may be behind by as much as it has in flight.
            behind_tokens = self._level_tokens() - (owner.counter + owner.tokens)
            owner.served_tokens += max(0, behind_tokens)
        self._waiting.put(name, owner.counter)
        if self._has_part(owner, owner.turns[0].size_bytes):
            self._in_part.put(name, owner.counter)
        else:
            self._in_part.drop(name)

    def _level_tokens(self) -> int:
        """Return what a newcomer starts with: the tokens that the owner was served who goes next,
        or of the owner who went last, if these are fewer.

        An owner who does not wait, or is held, may have been served next to nothing.
        """
        first = self._waiting.first()
        if first is None:
            return self._last_served_tokens
        return min(self._last_served_tokens, self._owners[first].served_tokens)

    def _forget(self, name: str) -> None:
        """Forget former owners, except those who would gain by it when they return."""
        owner = self._owners[name]
        if not owner.jobs and not owner.lines:
            self._ahead.put(name, owner.served_tokens)
        level_tokens = self._level_tokens()
        while (first := self._ahead.first()) is not None:
            if self._jobs and self._owners[first].served_tokens > level_tokens:
                return
            self._ahead.drop(first)
            del self._owners[first]

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
        name, is_of_part = self._waiting.first(), False
        if name is not None and not self._has_room(self._owners[name].turns[0].size_bytes):
            # The next owner waits for the common rest, where nobody overtakes.
            name, is_of_part = self._in_part.first(), True
        if name is None:
            return
        owner = self._owners[name]
        grant = owner.turns[0]
        if is_of_part:
            if not self._have_parts_room(grant.size_bytes):
                return
        else:
            self._last_served_tokens = owner.served_tokens
        del owner.turns[0]
        grant.is_of_part = is_of_part
        self._count(grant, 1)
        self._place(name)
        if not grant.granted.cancelled():  # If it is, ``acquire`` is about to release the slot.
            grant.granted.set_result(None)
        self._grant_soon()

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
