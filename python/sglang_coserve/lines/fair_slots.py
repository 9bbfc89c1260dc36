"""Which batch may send its next line: a semaphore that is fair in tokens.

Owners share alike, whatever batches they have, and the batches of an owner share what is
the owner's: an urgent batch first, then priority by priority, in proportion to their
weights. Both by virtual token counters: whoever has taken the fewest tokens per weight
goes next, and one that joins, or comes back, starts level with the least served, so that
having been away earns nothing (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024, section 4.1). Two owners, or two batches of one priority, that both
always wait differ by one line's tokens per weight at most. A line counts as what it is
expected to take while it is in flight, and as what it took from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["FairSlots", "JobShare", "Share"]


class Share:
    """What an owner, or a batch, has taken."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.served_per_weight = 0.0
        """Tokens of finished lines per weight, and what was given for having been away."""

        self.tokens_in_flight = 0
        """What the lines in flight are expected to take."""

        self.lines_in_flight = 0

    @property
    def taken_per_weight(self) -> float:
        """What the share with the smallest value is next by."""
        return self.served_per_weight + self.tokens_in_flight / self.weight

    def begin(self, estimated_tokens: int) -> None:
        """Count a line that is sent."""
        self.lines_in_flight += 1
        self.tokens_in_flight += estimated_tokens

    def end(self, estimated_tokens: int, tokens: int) -> None:
        """Count a line that has come back, after ``tokens``."""
        self.lines_in_flight -= 1
        self.tokens_in_flight -= estimated_tokens
        self.served_per_weight += tokens / self.weight

    def level(self, others: Iterable[Share]) -> None:
        """Take from a share that was idle what it would have saved up; ``others`` were not."""
        least = min((other.served_per_weight for other in others), default=0.0)
        self.served_per_weight = max(self.served_per_weight, least)


class JobShare(Share):
    """One batch, as the slots see it."""

    def __init__(self, owner: str, priority: int, weight: float, deadline_s: float) -> None:
        super().__init__(weight)
        self.owner = owner
        self.priority = priority
        self.deadline_s = deadline_s
        self.is_urgent = False
        """True to go before every job of its owner that is not, whatever its priority, the
        earliest deadline first."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a waiting job asks for."""

    size_bytes: int
    estimated_tokens: int
    granted: asyncio.Future[None]


class FairSlots:
    """At most ``max_lines`` lines in flight, of ``max_bytes`` together; a larger one alone."""

    def __init__(self, max_lines: int, max_bytes: int) -> None:
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self.lines_in_flight = 0
        self.bytes_in_flight = 0
        self._waiting: dict[JobShare, _Turn] = {}
        self._jobs: set[JobShare] = set()
        self._owners: dict[str, Share] = {}
        """Of those with a job, and of those who would earn something by leaving."""

        self._is_granting = False

    def resize(self, max_lines: int) -> None:
        """Let another number of lines be in flight; those that are stay."""
        self._max_lines = max_lines
        self._grant_soon()

    def join(self, job: JobShare) -> None:
        """Let ``job`` take part."""
        self._jobs.add(job)
        self._owners.setdefault(job.owner, Share())
        self._level(job)

    def leave(self, job: JobShare) -> None:
        """Let ``job`` take part no more; its lines in flight are still to be released."""
        self._jobs.discard(job)
        self._forget_owners()

    async def acquire(self, job: JobShare, size_bytes: int, estimated_tokens: int) -> None:
        """Wait until ``job`` may send its next line. One call per job at a time."""
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
        """Give back what ``acquire`` took; the line has taken ``tokens``."""
        self.lines_in_flight -= 1
        self.bytes_in_flight -= size_bytes
        job.end(estimated_tokens, tokens)
        self._owners[job.owner].end(estimated_tokens, tokens)
        if job not in self._jobs:
            self._forget_owners()
        self._grant_soon()

    def _level(self, job: JobShare) -> None:
        """Take from a job, or an owner, who is idle what they would have saved up."""
        others = [
            other
            for other in self._jobs
            if other is not job and (other.lines_in_flight or other in self._waiting)
        ]
        if not job.lines_in_flight:
            job.level(
                other
                for other in others
                if (other.owner, other.priority) == (job.owner, job.priority)
            )
        owner = self._owners[job.owner]
        busy = {other.owner for other in others}
        if not owner.lines_in_flight and job.owner not in busy:
            owner.level(self._owners[name] for name in busy)

    def _forget_owners(self) -> None:
        """Forget who has left, unless coming back would then be worth it."""
        staying = {job.owner for job in self._jobs}
        least = min((self._owners[name].served_per_weight for name in staying), default=None)
        self._owners = {
            name: owner
            for name, owner in self._owners.items()
            if name in staying
            or owner.lines_in_flight
            or (least is not None and owner.served_per_weight > least)
        }

    def _grant_soon(self) -> None:
        if not self._is_granting:
            self._is_granting = True
            asyncio.get_running_loop().call_soon(self._grant)

    def _grant(self) -> None:
        """Grant one turn. The next one waits until the job that had this one can ask again.

        When many lines end at once, it would otherwise be the other jobs' turn only
        because they were there.
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
                job.begin(turn.estimated_tokens)
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

    def _sort_key(self, job: JobShare) -> tuple[float, str, bool, float, float, float]:
        """The smallest goes next."""
        return (
            self._owners[job.owner].taken_per_weight,
            job.owner,  # Else the jobs of owners who are level would be compared.
            not job.is_urgent,
            job.deadline_s if job.is_urgent else 0.0,
            -job.priority,
            job.taken_per_weight,
        )
