"""Offline rows that keep their KV while they sit outside SGLang's batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT, ScheduleBatch

from sglang_coserve.srt.row_groups import has_plain_state, join, split

__all__ = ["HeldRows", "SetAside"]

Req = Any


class SetAside:
    """Parked rows, whose prefill is unfinished, and paused ones, which decode.

    Paused rows stay in a batch of their own, because their sampling state lives
    in the batch's tensors. Whoever takes rows out for good releases their KV.
    """

    def __init__(self) -> None:
        self._parked: dict[str, Req] = {}
        self._paused: ScheduleBatch | None = None

    def __len__(self) -> int:
        return len(self._parked) + len(self.paused)

    @property
    def parked(self) -> list[Req]:
        """In the order they were parked."""
        return list(self._parked.values())

    @property
    def paused(self) -> list[Req]:
        """In the order they joined."""
        return list(self._paused.reqs) if self._paused is not None else []

    @property
    def reqs(self) -> list[Req]:
        """All of them."""
        return [*self.paused, *self.parked]

    def is_parked(self, rid: str) -> bool:
        """Return whether the row named ``rid`` is parked."""
        return rid in self._parked

    # --- Parked --------------------------------------------------------------------------

    def park(self, req: Req) -> None:
        """Keep a row whose prefill is unfinished."""
        self._parked[req.rid] = req

    def unpark(self, rid: str) -> Req:
        """Take out a parked row."""
        return self._parked.pop(rid)

    def unpark_all(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Take out the parked rows that match; O(parked)."""
        return [self.unpark(req.rid) for req in self.parked if matches(req)]

    # --- Paused --------------------------------------------------------------------------

    def pause(self, running: ScheduleBatch, rids: Collection[str]) -> None:
        """Take the rows named in ``rids`` out of the running batch; they have plain state."""
        self.hold(split(running, rids))

    def hold(self, decodes: ScheduleBatch | None) -> None:
        """Keep a batch of rows that decode and have plain state."""
        self._paused = join(self._paused, decodes)

    def take_paused_batch(self) -> ScheduleBatch:
        """Take out the batch of the paused rows; empty if there are none."""
        batch, self._paused = self._paused, None
        return ScheduleBatch(reqs=[], batch_is_full=False) if batch is None else batch

    def resume(self, running: ScheduleBatch, rids: Collection[str]) -> ScheduleBatch:
        """Return the running batch with those of ``rids`` that were paused."""
        if self._paused is None or not rids:
            return running
        running = join(running, split(self._paused, rids))
        self._drop_empty_batch()
        return running

    def resume_ended(self, running: ScheduleBatch) -> ScheduleBatch:
        """Return the running batch with the paused rows that were aborted: they end in it.

        To be called before each pass: under overlap scheduling the result of the
        last step may also end a row that is paused by then. Rows that cannot be split off
        end in the next step of the offline lane.
        """
        if self._paused is None:
            return running
        self._paused.filter_batch()
        aborted = {
            req.rid
            for req in self._paused.reqs
            if req.to_finish is not None and has_plain_state(req)
        }
        running = self.resume(running, aborted)
        self._drop_empty_batch()
        return running

    def abort_paused(self, matches: Callable[[Req], bool]) -> None:
        """Let the paused rows that match end as soon as they run next."""
        for req in self.paused:
            if matches(req) and not req.finished():
                req.to_finish = FINISH_ABORT()

    def take_paused(
        self, evict_rows: Callable[[ScheduleBatch, Collection[str]], None], rids: Collection[str]
    ) -> None:
        """Let ``evict_rows`` take the rows named in ``rids`` out of the paused batch."""
        if self._paused is not None:
            evict_rows(self._paused, rids)
            self._drop_empty_batch()

    def take_all(self) -> list[Req]:
        """Take out every row, with nothing of its batch kept."""
        reqs = [*self.parked, *self.paused]
        self._parked, self._paused = {}, None
        return reqs

    def _drop_empty_batch(self) -> None:
        if self._paused is not None and not self._paused.reqs:
            self._paused = None


class HeldRows:
    """What SGLang's memory check takes for the running batch: rows with KV, each counted once."""

    def __init__(self, reqs: Iterable[Req], counted: Iterable[Req]) -> None:
        """``counted`` are rows that SGLang counts itself."""
        seen = {id(req) for req in counted}
        self.reqs: list[Req] = []
        for req in reqs:
            if id(req) not in seen:
                seen.add(id(req))
                self.reqs.append(req)

    def is_empty(self) -> bool:
        """Return whether there are no such rows."""
        return not self.reqs
