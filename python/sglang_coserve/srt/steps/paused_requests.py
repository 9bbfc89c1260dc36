"""Holds the paused and parked offline requests, which keep their KV outside of SGLang's batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT, ScheduleBatch

from sglang_coserve.srt.steps.request_groups import has_plain_state, join, split

__all__ = ["CountedRequests", "PausedRequests"]

Req = Any


class PausedRequests:
    """Parked requests (unfinished prefills) and paused requests (decodes).

    Paused requests stay in a batch of their own, because their sampling state is
    in the batch's tensors. This class never releases KV: that is up to the caller that
    removes requests for good.
    """

    def __init__(self) -> None:
        self._parked: dict[str, Req] = {}
        self._paused: ScheduleBatch | None = None

    def __len__(self) -> int:
        return len(self._parked) + len(self.paused)

    @property
    def parked(self) -> list[Req]:
        """The parked requests, in the order in which they were parked."""
        return list(self._parked.values())

    @property
    def paused(self) -> list[Req]:
        """The paused requests, in the order in which they joined."""
        return list(self._paused.reqs) if self._paused is not None else []

    @property
    def reqs(self) -> list[Req]:
        """All paused and parked requests."""
        return [*self.paused, *self.parked]

    def is_parked(self, rid: str) -> bool:
        """Return whether the request named ``rid`` is parked."""
        return rid in self._parked

    # --- Parked --------------------------------------------------------------------------

    def park(self, req: Req) -> None:
        """Add a request whose prefill is unfinished."""
        self._parked[req.rid] = req

    def unpark(self, rid: str) -> Req:
        """Remove and return a parked request."""
        return self._parked.pop(rid)

    def unpark_all(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Remove and return the parked requests that match. O(parked)."""
        return [self.unpark(req.rid) for req in self.parked if matches(req)]

    # --- Paused --------------------------------------------------------------------------

    def pause(self, running: ScheduleBatch, rids: Collection[str]) -> None:
        """Move the requests in ``rids``, which must have plain state, out of the running batch."""
        self.hold(split(running, rids))

    def hold(self, decodes: ScheduleBatch | None) -> None:
        """Add a batch of decodes to the paused requests."""
        self._paused = join(self._paused, decodes)

    def take_paused_batch(self) -> ScheduleBatch:
        """Remove and return the batch of paused requests; empty if there are none."""
        batch, self._paused = self._paused, None
        return ScheduleBatch(reqs=[], batch_is_full=False) if batch is None else batch

    def resume(self, running: ScheduleBatch, rids: Collection[str]) -> ScheduleBatch:
        """Move the paused requests in ``rids`` to the running batch, and return it."""
        if self._paused is None or not rids:
            return running
        running = join(running, split(self._paused, rids))
        self._drop_empty_batch()
        return running

    def resume_ended(self, running: ScheduleBatch) -> ScheduleBatch:
        """Move aborted paused requests to the running batch, where they end, and return it.

        To be called before each scheduling round; it also removes requests that have finished, as
        under overlap scheduling the result of the last step may end one paused since. Requests
        that cannot be split off end in the next step of the offline lane.
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
        """Mark the matching paused requests as aborted: they end when they run next."""
        for req in self.paused:
            if matches(req) and not req.finished():
                req.to_finish = FINISH_ABORT()

    def take_paused(
        self, retract: Callable[[ScheduleBatch, Collection[str]], None], rids: Collection[str]
    ) -> None:
        """Call ``retract`` to remove the requests in ``rids`` from the paused batch."""
        if self._paused is not None:
            retract(self._paused, rids)
            self._drop_empty_batch()

    def take_all(self) -> list[Req]:
        """Remove and return all requests, and discard their batch."""
        reqs = [*self.parked, *self.paused]
        self._parked, self._paused = {}, None
        return reqs

    def _drop_empty_batch(self) -> None:
        if self._paused is not None and not self._paused.reqs:
            self._paused = None


class CountedRequests:
    """The requests with KV, each once, in place of the running batch for SGLang's memory check."""

    def __init__(self, reqs: Iterable[Req], counted: Iterable[Req]) -> None:
        """``counted`` are requests that SGLang counts itself."""
        seen = {id(req) for req in counted}
        self.reqs: list[Req] = []
        for req in reqs:
            if id(req) not in seen:
                seen.add(id(req))
                self.reqs.append(req)

    def is_empty(self) -> bool:
        """Return whether there are no such requests."""
        return not self.reqs
