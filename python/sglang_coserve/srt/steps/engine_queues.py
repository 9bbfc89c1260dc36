"""Access to the queue and the batches of SGLang's scheduler, and to the requests outside of them.

Apart from SGLang itself, only this module writes the scheduler's ``waiting_queue``,
``running_batch``, ``chunked_req``, ``chunked_prefill_size`` and ``is_mixed_chunk``.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sglang_coserve.core.snapshot import ChunkRules
from sglang_coserve.srt import compat
from sglang_coserve.srt.steps.paused_requests import PausedRequests, empty_batch

Req = Any
ScheduleBatch = Any


class EngineQueues:
    """Reads and changes where SGLang's scheduler keeps its requests.

    SGLang's queue holds online requests, offline ones that are to fail, and, during a scheduling
    round, the offline ones that are offered for admission.
    """

    def __init__(self, scheduler: Any, *, micro_batches: int = 1) -> None:
        """``micro_batches`` is the number of micro-batches of a pipeline, scheduled in turn."""
        self.micro_batches = micro_batches
        self.turn = micro_batches - 1
        """The micro-batch being scheduled; before the first round, the last one."""

        self._scheduler = scheduler
        self._offered: list[Req] = []
        self._hidden: list[Req] = []
        """Requests of SGLang's queue that are not in it for this round."""

        self.paused_requests = PausedRequests()
        """Offline requests with KV that are in no batch of SGLang's."""

        self.suspended_batch: ScheduleBatch | None = None
        """The batch of the suspended step; only ``OfflineLane`` sets it."""

    # --- The waiting queue ---------------------------------------------------------------

    @property
    def waiting(self) -> list[Req]:
        """SGLang's queue, in its order; callers must not change it."""
        queue: list[Req] = self._scheduler.waiting_queue
        return queue

    @property
    def waiting_in_turn(self) -> list[Req]:
        """SGLang's queue in the order in which its requests are served; callers must not change it.

        With ``--enable-priority-scheduling`` that is by priority, and by arrival within a priority.
        """
        if not self._scheduler.enable_priority_scheduling:
            return self.waiting
        return sorted(self.waiting, key=lambda req: (-self.rank(req), _entered(req)))

    def rank(self, req: Req) -> int:
        """Return the priority of a request; a higher one goes first."""
        low_first = self._scheduler.schedule_low_priority_values_first
        return -req.priority if low_first else int(req.priority)

    def displaces_another(self, req: Req, running: Iterable[Req]) -> bool:
        """Return whether SGLang may retract one of the ``running`` requests for this one."""
        if not self._scheduler.enable_priority_preemption:
            return False
        threshold = self._scheduler.priority_scheduling_preemption_threshold
        return any(self.rank(req) - self.rank(one) > threshold for one in running)

    @property
    def has_others_waiting(self) -> bool:
        """Whether the queue has requests that were not offered, i.e. online ones."""
        return len(self.waiting) > len(self._offered)

    def offer(self, rids: Sequence[str], offered: Sequence[Req]) -> None:
        """Leave only the requests with these ids in the queue for this round, in that order, with
        the ``offered`` ones behind them.

        The others are hidden until ``withdraw``. O(place of the last in the queue), and a copy.
        """
        sought, found = set(rids), dict[str, Req]()
        queue, self._hidden = iter(self.waiting), []
        while sought and (req := next(queue, None)) is not None:
            if req.rid in sought:
                sought.discard(req.rid)
                found[req.rid] = req
            else:
                self._hidden.append(req)
        self._hidden += queue
        self._offered = list(offered)
        shown = [found[rid] for rid in rids if rid in found]
        self._scheduler.waiting_queue = [*shown, *offered]

    def withdraw(self) -> list[Req]:
        """End the offer, if there is one; return the offered requests that were admitted.

        The queue then has what was not admitted of its own, what was hidden, and what has come
        meanwhile, in order of arrival. O(shown), and a copy.
        """
        left, offered = set(map(id, self.waiting)), set(map(id, self._offered))
        admitted = [req for req in self._offered if id(req) not in left]
        queue, self._hidden, self._offered = self._hidden, [], []
        for req in self.waiting:
            # By identity: the queue also holds offline requests that failed validation.
            if id(req) not in offered:
                insort(queue, req, key=_entered)
        self._scheduler.waiting_queue = queue
        return admitted

    @contextmanager
    def own_queue(self) -> Iterator[None]:
        """Let SGLang see its own queue while it takes in a request: whether that is full, and who
        would have to go, is a matter of what waits there, whatever a round offers or hides.

        Requests that come are visible in this round, before the offered ones. O(1) between rounds.
        """
        if not self._offered and not self._hidden:
            yield
            return
        offered, hidden = set(map(id, self._offered)), set(map(id, self._hidden))
        left = [req for req in self.waiting if id(req) in offered]
        self._scheduler.waiting_queue = [req for req in self.waiting if id(req) not in offered]
        self._scheduler.waiting_queue += self._hidden
        try:
            yield
        finally:
            queue = self.waiting
            self._hidden = [req for req in queue if id(req) in hidden]
            shown = [req for req in queue if id(req) not in hidden]
            self._scheduler.waiting_queue = [*shown, *left]

    @contextmanager
    def showing_only(self, req: Req | None) -> Iterator[None]:
        """Let SGLang see no request of its queue but this one, if it waits there, between rounds.

        SGLang may take the request out. A search in C, in place of a look at each request.
        """
        queue = self.waiting
        waits = req is not None and req in queue
        self._scheduler.waiting_queue = [req] if waits else []
        try:
            yield
        finally:
            if waits and req not in self.waiting:
                queue.remove(req)
            self._scheduler.waiting_queue = queue

    def remove_waiting(self, rid: str) -> list[Req]:
        """Remove the requests with this id from the queue, and return them."""
        removed = [req for req in self.waiting if req.rid == rid]
        for req in removed:
            self.waiting.remove(req)
        return removed

    def requeue(self, req: Req) -> None:
        """Requeue a request whose KV was released."""
        self._scheduler._add_request_to_queue(req, is_retracted=True)

    # --- The unfinished prefill ----------------------------------------------------------

    @property
    def chunk(self) -> Req | None:
        """SGLang's unfinished prefill, of which there is at most one."""
        return self._scheduler.chunked_req

    @property
    def can_take_chunk(self) -> bool:
        """Whether there is an unfinished prefill that SGLang is not about to abort."""
        pending = self._scheduler._pending_chunked_abort_req
        return self.chunk is not None and self.chunk is not pending

    def put_chunk(self, req: Req | None) -> None:
        """Make SGLang continue the prefill of this request."""
        self._scheduler.chunked_req = req

    def take_chunk(self) -> Req:
        """Remove the unfinished prefill from SGLang without releasing its KV."""
        req, self._scheduler.chunked_req = self._scheduler.chunked_req, None
        assert req is not None
        return req

    def park_chunk(self) -> bool:
        """Park the unfinished prefill, and return True; False if there is none, or SGLang is about
        to abort it."""
        if not self.can_take_chunk:
            return False
        self.paused_requests.park(self.take_chunk())
        return True

    @property
    def chunk_rules(self) -> ChunkRules:
        """The pieces in which SGLang computes prompts.

        Without a chunk size it computes whole prompts. It then runs none beside decodes: for some
        models it has unset the size because both give wrong results.
        """
        scheduler = self._scheduler
        return ChunkRules(
            may_cut=scheduler.chunked_prefill_size is not None,
            align_tokens=scheduler.truncation_align_size or 1,
        )

    @contextmanager
    def chunk_size(self, tokens: int, *, mixes_decodes: bool) -> Iterator[None]:
        """Set the size of SGLang's prefill batches, and whether they include all decodes.

        Where SGLang has no size, prompts stay whole, and apart from decodes.
        """
        scheduler = self._scheduler
        size, mixed = scheduler.chunked_prefill_size, scheduler.is_mixed_chunk
        if size is not None:
            scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = tokens, mixes_decodes
        try:
            yield
        finally:
            scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = size, mixed

    # --- Micro-batches -------------------------------------------------------------------

    @property
    def passes_to_settle(self) -> int:
        """Most scheduling rounds between the one that launches a batch and its results."""
        return max(self.micro_batches - 1, 1)

    def begin_turn(self) -> None:
        """Begin a scheduling round: the next micro-batch in turn."""
        self.turn = (self.turn + 1) % self.micro_batches

    def end_turn(self, batch: ScheduleBatch | None) -> None:
        """End a scheduling round with this batch; None if nothing is to run.

        In the latter case SGLang would keep the previous batch as the micro-batch's last one, and
        merge its requests, which may have been paused since, into the running batch once more.
        """
        if self.micro_batches > 1 and batch is None:
            self._scheduler.last_mbs[self.turn] = None

    def elsewhere(self) -> list[Req]:
        """Return the unfinished requests with KV of the other micro-batches. O(requests).

        Without paused and parked requests and the unfinished prefill, which belong to none of them.
        """
        if self.micro_batches == 1:
            return []
        scheduler = self._scheduler
        here = {
            id(req)
            for req in (*scheduler.running_batch.reqs, *self.paused_requests.reqs, self.chunk)
        }
        requests: dict[int, Req] = {}
        for turn in range(self.micro_batches):
            if turn == self.turn:
                continue
            for batch in (scheduler.running_mbs[turn], scheduler.mbs[turn]):
                if batch is not None:
                    requests |= {id(req): req for req in batch.reqs if id(req) not in here}
        return [req for req in requests.values() if not req.finished() and compat.holds_kv(req)]

    def kept(self) -> Iterator[Req]:
        """Yield every request that SGLang keeps, and those with KV in none of its places; some
        twice. To be called between two rounds; O(requests).

        SGLang has more places in modes that co-serving refuses (``compat.settings``).
        """
        yield from self.waiting
        yield from self.placed()

    def placed(self) -> Iterator[Req]:
        """Yield the same but for those of SGLang's queue. O(requests in batches)."""
        scheduler = self._scheduler
        yield from scheduler.grammar_manager.grammar_queue
        yield from self.requests_with_kv(scheduler.running_batch)
        unprocessed = (batch for batch, _ in compat.results_in_flight(scheduler))
        batches = [scheduler.last_batch, *unprocessed]
        if self.micro_batches > 1:
            batches += [*scheduler.running_mbs, *scheduler.mbs, *scheduler.last_mbs]
        for batch in batches:
            if batch is not None:
                yield from batch.reqs

    # --- Requests with KV --------------------------------------------------------------------

    @property
    def suspended(self) -> list[Req]:
        """The requests of the suspended step; callers must not change the list."""
        return [] if self.suspended_batch is None else self.suspended_batch.reqs

    def running_requests(self) -> list[Req]:
        """Return the unfinished decodes of all micro-batches; O(requests)."""
        batches = self._scheduler.running_mbs if self.micro_batches > 1 else ()
        requests = {
            id(req): req
            for batch in (*batches, self._scheduler.running_batch)
            for req in batch.reqs
        }
        return [req for req in requests.values() if not req.finished()]

    def requests_with_kv(self, running_batch: ScheduleBatch) -> Iterator[Req]:
        """Yield those with KV: decoding, paused, parked, suspended, the unfinished prefill."""
        yield from running_batch.reqs
        yield from self.paused_requests.reqs
        yield from self.suspended
        if self.chunk is not None:
            yield self.chunk

    def counted_requests(self) -> ScheduleBatch:
        """Return a batch that SGLang's memory check must count instead of the running one: of all
        requests with KV, each once, but for those of the last batch, which it counts itself."""
        last = self._scheduler.last_batch
        counted = set(map(id, last.reqs)) if last else set()
        reqs = {id(req): req for req in self.requests_with_kv(self._scheduler.running_batch)}
        counts = empty_batch()
        counts.reqs = [req for key, req in reqs.items() if key not in counted]
        return counts

    def give_back(self, reqs: Sequence[Req]) -> None:
        """Add these requests, and the paused and parked ones, to the running batch, so that SGLang
        retracts them with it."""
        running = self._scheduler.running_batch
        running.reqs = [*running.reqs, *self.paused_requests.take_all(), *reqs]


def _entered(req: Req) -> float:
    return float(req.time_stats.wait_queue_entry_time)
