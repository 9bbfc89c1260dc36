"""Where SGLang's scheduler keeps its requests, and the offline rows beside them.

The only writer, besides SGLang itself, of the scheduler's ``waiting_queue``,
``running_batch``, ``chunked_req``, ``chunked_prefill_size`` and ``is_mixed_chunk``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

from sglang_coserve.srt import compat
from sglang_coserve.srt.request_marks import is_offline
from sglang_coserve.srt.set_aside import HeldRows, SetAside

__all__ = ["EngineView"]

Req = Any
ScheduleBatch = Any


class EngineView:
    """See the module's docstring.

    SGLang's queue holds online requests, offline ones that are to fail, and, within a pass,
    the offline ones that are offered for admission.
    """

    def __init__(self, scheduler: Any, *, micro_batches: int = 1) -> None:
        """``micro_batches`` are those of a pipeline, which take turns, a pass each."""
        self.micro_batches = micro_batches
        self.turn = micro_batches - 1
        """The micro-batch whose pass it is; before the first pass the last."""

        self._scheduler = scheduler
        self._offered: list[Req] = []
        self.aside = SetAside()
        """Offline rows with KV that are in no batch of SGLang's."""

        self.suspended: tuple[Req, ...] = ()
        """Those of the suspended step."""

    # --- Who waits -----------------------------------------------------------------------

    @property
    def waiting(self) -> list[Req]:
        """SGLang's queue, in its order; not to be changed."""
        queue: list[Req] = self._scheduler.waiting_queue
        return queue

    @property
    def has_others_waiting(self) -> bool:
        """Whether requests are in the queue that were not offered: online ones."""
        return len(self.waiting) > len(self._offered)

    def offer(self, reqs: Sequence[Req]) -> None:
        """Put offline requests behind all others for this pass."""
        self._offered = list(reqs)
        self._scheduler.waiting_queue = [*self.waiting, *reqs]

    def offer_only(self, reqs: Sequence[Req], offered: Sequence[Req]) -> list[Req]:
        """Let the queue be ``reqs`` for this pass, of which ``offered`` are not from it.

        Returns those that were in it and are not now.
        """
        hidden = [req for req in self.waiting if req not in reqs]
        self._offered = list(offered)
        self._scheduler.waiting_queue = list(reqs)
        return hidden

    def withdraw(self) -> tuple[list[Req], int]:
        """Take what was offered and not admitted out of the queue; return it, and how many were
        admitted."""
        # By identity: the queue also holds offline requests that failed validation.
        offered = {id(req) for req in self._offered}
        left = [req for req in self.waiting if id(req) in offered]
        if left:
            self._scheduler.waiting_queue = [r for r in self.waiting if id(r) not in offered]
        self._offered = []
        return left, len(offered) - len(left)

    def show_again(self, hidden: Iterable[Req]) -> None:
        """Put back what ``offer_only`` hid, in order of arrival."""
        self._scheduler.waiting_queue = sorted(
            [*self.waiting, *hidden], key=lambda req: req.time_stats.wait_queue_entry_time
        )

    def move_before_offered(self, req: Req) -> None:
        """Let a request that has joined the queue during a pass go before the offered ones."""
        queue = self.waiting
        if self._offered and queue and queue[-1] is req:
            queue.pop()
            queue.insert(len(queue) - len(self._offered), req)

    def remove_waiting(self, rid: str) -> list[Req]:
        """Take the requests of this name out of the queue."""
        removed = [req for req in self.waiting if req.rid == rid]
        for req in removed:
            self.waiting.remove(req)
        return removed

    def wait_again(self, reqs: Sequence[Req]) -> None:
        """Let requests wait whose prefill was given up: those of SGLang's queue as its first.

        There is room in the running batch now.
        """
        self._scheduler.running_batch.batch_is_full = False
        # One that is to fail takes SGLang's way out, whatever its class.
        is_ours = [is_offline(req) and req.to_finish is None for req in reqs]
        first = [req for req, ours in zip(reqs, is_ours, strict=True) if not ours]
        self._scheduler.waiting_queue = [*first, *self.waiting]
        for req in compress(reqs, is_ours):
            self.requeue(req)

    def requeue(self, req: Req) -> None:
        """Let a request wait whose KV was released."""
        self._scheduler._add_request_to_queue(req, is_retracted=True)

    # --- The unfinished prefill ----------------------------------------------------------

    @property
    def chunk(self) -> Req | None:
        """The one request that SGLang has computed chunks of, and not all."""
        return self._scheduler.chunked_req

    @property
    def can_take_chunk(self) -> bool:
        """Whether there is an unfinished prefill that SGLang is not about to abort."""
        pending = self._scheduler._pending_chunked_abort_req
        return self.chunk is not None and self.chunk is not pending

    def put_chunk(self, req: Req | None) -> None:
        """Let SGLang go on with the prefill of this request."""
        self._scheduler.chunked_req = req

    def take_chunk(self) -> Req:
        """Take the unfinished prefill from SGLang, its KV kept."""
        req, self._scheduler.chunked_req = self._scheduler.chunked_req, None
        assert req is not None
        return req

    @contextmanager
    def chunk_size(self, tokens: int, *, mixes_decodes: bool) -> Iterator[None]:
        """Within it SGLang's prefill batches have this size, and all decodes in them or none."""
        scheduler = self._scheduler
        size, mixed = scheduler.chunked_prefill_size, scheduler.is_mixed_chunk
        scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = tokens, mixes_decodes
        try:
            yield
        finally:
            scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = size, mixed

    # --- Micro-batches -------------------------------------------------------------------

    @property
    def passes_to_settle(self) -> int:
        """In how many passes at most a batch's results come, after the pass that it runs in."""
        return max(self.micro_batches - 1, 1)

    def begin_turn(self) -> None:
        """Note that a pass begins: SGLang's event loop goes round all micro-batches."""
        self.turn = (self.turn + 1) % self.micro_batches

    def end_turn(self, batch: ScheduleBatch | None) -> None:
        """Note the batch that a pass ends with; None if nothing is to run.

        SGLang would go on to call the batch before it the micro-batch's last one, and let its
        rows, which may have been paused since, join the running batch once more.
        """
        if self.micro_batches > 1 and batch is None:
            self._scheduler.last_mbs[self.turn] = None

    def elsewhere(self) -> list[Req]:
        """Return the unfinished requests with KV of the other micro-batches; O(rows).

        Without those that are beside the batches, or whose prefill goes on from batch to batch.
        """
        if self.micro_batches == 1:
            return []
        scheduler = self._scheduler
        here = {id(req) for req in (*scheduler.running_batch.reqs, *self.aside.reqs, self.chunk)}
        rows: dict[int, Req] = {}
        for turn in range(self.micro_batches):
            if turn == self.turn:
                continue
            for batch in (scheduler.running_mbs[turn], scheduler.mbs[turn]):
                if batch is not None:
                    rows |= {id(req): req for req in batch.reqs if id(req) not in here}
        return [req for req in rows.values() if not req.finished() and compat.holds_kv(req)]

    # --- Rows with KV --------------------------------------------------------------------

    def running_rows(self) -> list[Req]:
        """Return the unfinished decodes of all micro-batches; O(rows)."""
        batches = self._scheduler.running_mbs if self.micro_batches > 1 else ()
        rows = {
            id(req): req
            for batch in (*batches, self._scheduler.running_batch)
            for req in batch.reqs
        }
        return [req for req in rows.values() if not req.finished()]

    def rows_with_kv(self, running_batch: ScheduleBatch) -> Iterator[Req]:
        """Yield the decodes of ``running_batch``, the rows set aside and the unfinished prefill."""
        yield from running_batch.reqs
        yield from self.aside.reqs
        yield from self.suspended
        if self.chunk is not None:
            yield self.chunk

    def held_rows(self) -> HeldRows:
        """Return what SGLang's memory check is to take for the running batch."""
        scheduler = self._scheduler
        return HeldRows(
            self.rows_with_kv(scheduler.running_batch),
            counted=scheduler.last_batch.reqs if scheduler.last_batch else (),
        )

    def give_back(self, reqs: Sequence[Req]) -> None:
        """Let SGLang retract these rows, and those set aside, with the running ones."""
        running = self._scheduler.running_batch
        running.reqs = [*running.reqs, *self.aside.take_all(), *reqs]
