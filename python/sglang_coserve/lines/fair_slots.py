"""A semaphore, fair in tokens, that decides which job may send its next line.

Owners get equal shares, however many jobs they have. An owner's share goes to the job of the
highest priority, among equals to the one with the earliest deadline. Owners have virtual token
counters: the owner with the fewest tokens goes next, and an owner who joins or returns starts level
with the least served, so that idle time earns nothing (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024, section 4.1). Two owners who always wait differ by at most one line's
tokens. A line counts with its estimated tokens while it is in flight, and with its real tokens
afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass


class JobShare:
    """A job that takes slots."""

    def __init__(self, owner: str, priority: int, deadline_s: float) -> None:
        self.owner = owner
        self.priority = priority
        self.deadline_s = deadline_s
        self.lines_in_flight = 0


class _OwnerShare:
    """The tokens that an owner has taken so far."""

    def __init__(self) -> None:
        self.served = 0
        """Tokens of finished lines, plus what ``level`` has added."""

        self.tokens_in_flight = 0
        """Estimated tokens of the lines in flight."""

        self.lines_in_flight = 0

    @property
    def taken(self) -> int:
        """Sort key: the owner with the smallest value goes next."""
        return self.served + self.tokens_in_flight

    def begin(self, estimated_tokens: int) -> None:
        """Count a line that was sent."""
        self.lines_in_flight += 1
        self.tokens_in_flight += estimated_tokens

    def end(self, estimated_tokens: int, tokens: int) -> None:
        """Count a line that has ended and took ``tokens``."""
        self.lines_in_flight -= 1
        self.tokens_in_flight -= estimated_tokens
        self.served += tokens

    def level(self, others: Iterable[_OwnerShare]) -> None:
        """Raise the counter of an idle owner to the least of ``others``, who were not idle."""
        self.served = max(self.served, min((other.served for other in others), default=0))


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request of a waiting job for a slot."""

    size_bytes: int
    estimated_tokens: int
    granted: asyncio.Future[None]


class FairSlots:
    """Limits lines in flight to ``max_lines`` and ``max_bytes``; a larger line runs alone."""

    def __init__(self, max_lines: int, max_bytes: int) -> None:
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self.lines_in_flight = 0
        self.bytes_in_flight = 0
        self._waiting: dict[JobShare, _Turn] = {}
        self._jobs: set[JobShare] = set()
        self._owners: dict[str, _OwnerShare] = {}
        """Shares of owners with a job, and of former owners who would gain by being forgotten."""

        self._is_granting = False

    def resize(self, max_lines: int) -> None:
        """Let another number of lines be in flight; those that are stay."""
        self._max_lines = max_lines
        self._grant_soon()

    def join(self, job: JobShare) -> None:
        """Add a job."""
        self._jobs.add(job)
        self._owners.setdefault(job.owner, _OwnerShare())
        self._level(job)

    def leave(self, job: JobShare) -> None:
        """Remove a job; its lines in flight must still be released."""
        self._jobs.discard(job)
        self._forget_owners()

    async def acquire(self, job: JobShare, size_bytes: int, estimated_tokens: int) -> None:
        """Wait until ``job`` may send its next line. At most one call per job at a time."""
        assert job in self._jobs and job not in self._waiting
        self._level(job)
        turn = _Turn(size_bytes, estimated_tokens, asyncio.get_running_loop().create_future())
        self._waiting[job] = turn
        self._grant_soon()
        try:
            await turn.granted
        except asyncio.CancelledError:
            if turn.granted.cancelled():
                self._waiting.pop(job, None)
            else:
                self.release(job, size_bytes, estimated_tokens, 0)
            raise

    def release(self, job: JobShare, size_bytes: int, estimated_tokens: int, tokens: int) -> None:
        """Release the slot of a line that has ended and took ``tokens``."""
        self.lines_in_flight -= 1
        self.bytes_in_flight -= size_bytes
        job.lines_in_flight -= 1
        self._owners[job.owner].end(estimated_tokens, tokens)
        if job not in self._jobs:
            self._forget_owners()
        self._grant_soon()

    def _level(self, job: JobShare) -> None:
        """Level the counter of the owner of ``job`` with the busy ones, if the owner is idle."""
        busy = {
            other.owner
            for other in self._jobs
            if other is not job and (other.lines_in_flight or other in self._waiting)
        }
        owner = self._owners[job.owner]
        if not owner.lines_in_flight and job.owner not in busy:
            owner.level(self._owners[name] for name in busy)

    def _forget_owners(self) -> None:
        """Forget owners who have left, except those who would gain by it when they return."""
        staying = {job.owner for job in self._jobs}
        least = min((self._owners[name].served for name in staying), default=None)
        self._owners = {
            name: owner
            for name, owner in self._owners.items()
            if name in staying
            or owner.lines_in_flight
            or (least is not None and owner.served > least)
        }

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
        while self._waiting:
            job = min(self._waiting, key=self._sort_key)
            turn = self._waiting[job]
            if turn.granted.cancelled():
                del self._waiting[job]
                continue
            if self._has_room(turn.size_bytes):
                del self._waiting[job]
                self.lines_in_flight += 1
                self.bytes_in_flight += turn.size_bytes
                job.lines_in_flight += 1
                self._owners[job.owner].begin(turn.estimated_tokens)
                turn.granted.set_result(None)
                self._grant_soon()
            return

    def _has_room(self, size_bytes: int) -> bool:
        if not self.lines_in_flight:
            return True
        return (
            self.lines_in_flight < self._max_lines
            and self.bytes_in_flight + size_bytes <= self._max_bytes
        )

    def _sort_key(self, job: JobShare) -> tuple[int, str, int, float]:
        """The smallest goes next."""
        return (
            self._owners[job.owner].taken,
            job.owner,  # Keeps jobs of different owners with equal counters from being compared.
            -job.priority,
            job.deadline_s,
        )
