"""Which KV pages of offline rows to copy to host memory, and when (ConServe §4.4, BROS §V).

A row's full pages are saved in order, so its states are three counts. Every
decision is made from a snapshot and is an immutable value; steps are counted, not
timed, so that all ranks of a tensor-parallel engine decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

from sglang_coserve.core.request import RequestClass

__all__ = [
    "LEGAL_PAGE_TRANSITIONS",
    "Backoff",
    "CheckpointMode",
    "CheckpointPolicy",
    "CheckpointSnapshot",
    "HostQuota",
    "PageCopy",
    "PageState",
    "RowPages",
    "RowToSave",
    "is_stuck",
    "plan_copies",
    "reclaim_tokens",
]


class CheckpointMode(Enum):
    """When offline KV is copied to host memory."""

    OFF = "off"

    EAGER = "eager"
    """Each iteration's new full pages (ConServe): many small copies, instant reclaim."""

    LAZY = "lazy"
    """What is about to be reclaimed (BROS): fewest copies, but online admission waits for them."""

    PRESSURE = "pressure"
    """Like eager, but only while the device is nearly full."""


class PageState(Enum):
    """Where a full page of KV is."""

    DIRTY = "dirty"
    """On the device alone: lost when it is reclaimed."""

    COPYING = "copying"
    """A copy is under way; it does not count before its event has come."""

    SAVED = "saved"
    """In host memory as well: reclaiming it costs nothing."""


LEGAL_PAGE_TRANSITIONS: Final = MappingProxyType(
    {
        PageState.DIRTY: frozenset({PageState.COPYING}),
        PageState.COPYING: frozenset({PageState.SAVED}),
        PageState.SAVED: frozenset[PageState](),
    }
)
"""Pages are written once, so a saved page stays saved."""


class RowPages(NamedTuple):
    """The full pages of one row: first the saved ones, then those being copied, then the rest."""

    saved: int = 0
    copying: int = 0
    dirty: int = 0

    @property
    def total(self) -> int:
        """All full pages."""
        return self.saved + self.copying + self.dirty

    @property
    def sent(self) -> int:
        """Pages whose copy has at least begun."""
        return self.saved + self.copying

    def state(self, page: int) -> PageState:
        """Return the state of the page at this place; O(1)."""
        assert 0 <= page < self.total
        if page < self.saved:
            return PageState.SAVED
        return PageState.COPYING if page < self.sent else PageState.DIRTY

    def grown(self, total: int) -> RowPages:
        """Return the row with ``total`` full pages, at least as many as before."""
        assert total >= self.total, "computed pages do not shrink"
        return RowPages(self.saved, self.copying, total - self.sent)

    def copy_begun(self, pages: int) -> RowPages:
        """Return the row once a copy of its first dirty pages has begun."""
        assert 0 < pages <= self.dirty, "only dirty pages can be copied"
        return RowPages(self.saved, self.copying + pages, self.dirty - pages)

    def copy_done(self, pages: int) -> RowPages:
        """Return the row once the event of its oldest copy, of so many pages, has come."""
        assert 0 < pages <= self.copying, "only pages being copied become saved"
        return RowPages(self.saved + pages, self.copying - pages, self.dirty)


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """How much is copied, and how much is reclaimed at a time."""

    mode: CheckpointMode
    watermark: float = 0.8
    """Share of the device's KV in use above which ``PRESSURE`` copies."""

    step_tokens: int = 4096
    """Most tokens whose copy begins in one step; a prefix, saved whole, may exceed it."""

    in_flight_tokens: int = 16384
    """Copies begin only while fewer tokens than this are under way."""

    stall_steps: int = 256
    """A copy that takes longer than this many steps counts as stuck: no more are begun."""

    reclaim_tokens: int = 128
    """Least number of tokens to reclaim at a time, so that one is not asked for every iteration."""


class RowToSave(NamedTuple):
    """An offline row that has pages to save."""

    rid: str
    dirty_tokens: int
    yields_first: int = 0
    """Rank as a victim: less yields earlier (``core.preemption.yields_first``)."""


@dataclass(frozen=True, slots=True)
class CheckpointSnapshot:
    """The state of checkpointing between two iterations."""

    rows: Sequence[RowToSave]
    """In order of admission."""

    used_share: float
    """Part of the device's KV slots that rows hold."""

    in_flight_tokens: int = 0
    oldest_copy_steps: int = 0
    """Steps since the oldest copy that is under way began; 0 if none is."""


class PageCopy(NamedTuple):
    """Copy the first ``tokens`` dirty tokens of a row, whole pages."""

    rid: str
    tokens: int


def plan_copies(
    policy: CheckpointPolicy, snapshot: CheckpointSnapshot, page_tokens: int
) -> tuple[PageCopy, ...]:
    """Return the copies to begin now, likely victims first; O(rows log rows).

    Of rows that yield alike, the one admitted last is evicted first, so it is saved first.
    """
    if policy.mode in (CheckpointMode.OFF, CheckpointMode.LAZY):
        return ()
    if policy.mode is CheckpointMode.PRESSURE and snapshot.used_share < policy.watermark:
        return ()
    if is_stuck(policy, snapshot):
        return ()
    left = min(policy.step_tokens, policy.in_flight_tokens - snapshot.in_flight_tokens)
    copies = []
    order = sorted(
        range(len(snapshot.rows)), key=lambda place: (snapshot.rows[place].yields_first, -place)
    )
    for place in order:
        row = snapshot.rows[place]
        tokens = min(row.dirty_tokens, max(left, 0)) // page_tokens * page_tokens
        if tokens:
            copies.append(PageCopy(row.rid, tokens))
            left -= tokens
    return tuple(copies)


def is_stuck(policy: CheckpointPolicy, snapshot: CheckpointSnapshot) -> bool:
    """Return whether the copy engine no longer answers."""
    return snapshot.in_flight_tokens > 0 and snapshot.oldest_copy_steps > policy.stall_steps


def reclaim_tokens(wanted_tokens: int, least_tokens: int, page_tokens: int) -> int:
    """Return how many tokens to reclaim when ``wanted_tokens`` are asked for, whole pages."""
    return -(-max(wanted_tokens, least_tokens) // page_tokens) * page_tokens


@dataclass(frozen=True, slots=True)
class HostQuota:
    """Host memory of each class, in tokens; no class takes from another's."""

    online_tokens: int
    offline_tokens: int

    def limit(self, request_class: RequestClass) -> int:
        """Return the most tokens that a class may hold."""
        if request_class is RequestClass.ONLINE:
            return self.online_tokens
        return self.offline_tokens

    def shortage(
        self, request_class: RequestClass, used_tokens: int, wanted_tokens: int
    ) -> int | None:
        """Return how many tokens the class must give up first; None: it may never hold so many."""
        limit = self.limit(request_class)
        if wanted_tokens > limit:
            return None
        return max(0, used_tokens + wanted_tokens - limit)


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to do without host memory after it was refused: 1, 2, 4 … steps."""

    most_steps: int = 256
    failures: int = 0
    retry_step: int = 0

    def may_try(self, step: int) -> bool:
        """Return whether it is time to ask again."""
        return step >= self.retry_step

    def failed(self, step: int) -> Backoff:
        """Return the back-off after a refusal in this step."""
        wait = min(2**self.failures, self.most_steps)
        return replace(self, failures=min(self.failures + 1, 32), retry_step=step + 1 + wait)

    def succeeded(self) -> Backoff:
        """Return the back-off after memory was granted."""
        return replace(self, failures=0, retry_step=0) if self.failures else self
