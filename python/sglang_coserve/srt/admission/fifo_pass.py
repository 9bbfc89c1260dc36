"""One scheduling pass that SGLang alone decides on, with offline requests behind online ones.

It is what the policy fifo does in each pass, and any other policy in a pass for which there is no
plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, Protocol

from sglang_coserve.srt.compat import prefix_tokens
from sglang_coserve.srt.marks.request_marks import is_offline
from sglang_coserve.srt.steps.engine_view import EngineView
from sglang_coserve.srt.steps.kv_pools import KvPools
from sglang_coserve.srt.steps.offline_retraction import OfflineRetraction, Prefill

__all__ = ["FifoPass", "Waiting"]

_MAX_OFFERED: Final = 128
"""Offline requests offered to SGLang in one pass: its admission loop is linear in them."""

Req = Any
ScheduleBatch = Any


class Waiting(Protocol):
    """The offline requests that wait."""

    @property
    def has_ready(self) -> bool:
        """Whether one of them may be admitted in this pass."""
        ...

    def take(self, count: int) -> list[Req]:
        """Remove and return the first of them, at most so many."""
        ...

    def put_back_taken(self, reqs: Iterable[Req]) -> None:
        """Return, in their order, those that were taken in this pass but not admitted."""
        ...


class FifoPass:
    """See the module's docstring."""

    def __init__(
        self,
        scheduler: Any,
        most_running: int | None,
        *,
        pools: KvPools,
        view: EngineView,
        retraction: OfflineRetraction,
        events: Counter[str],
        waiting: Waiting,
    ) -> None:
        """``most_running`` is how many offline requests may run; None for any number."""
        self._scheduler = scheduler
        self._most_running = most_running
        self._pools = pools
        self._view = view
        self._retraction = retraction
        self._events = events
        self._waiting = waiting

    def admit(
        self, running_batch: ScheduleBatch, prefill: Prefill, *, takes_offline: bool = True
    ) -> Any:
        """Admit online requests as SGLang does; offline ones only when none of them waits.

        Without ``takes_offline`` those that wait go on waiting.
        """
        is_offered = False
        if self._online_waits():
            self._release_offline_chunk()
            self._make_room_for_online_chunk(running_batch)
            if in_the_way := self._retraction.rids_blocking_adapters(running_batch.reqs):
                running_batch.filter_batch()  # A finished request has nothing left to release.
                self._retraction.retract(in_the_way, running_batch)
        elif takes_offline and self._waiting.has_ready:
            is_offered = self._offer(running_batch)
        plan = self._retraction.admit(running_batch, prefill)
        if is_offered:
            left, num_admitted = self._view.withdraw()
            self._waiting.put_back_taken(left)
            self._events["admitted"] += num_admitted
            # A batch that is full for an offline request may have room for an online one, which
            # may be smaller and can displace offline requests.
            plan.running_batch.batch_is_full = False
        return plan

    def _online_waits(self) -> bool:
        """True when an online request has no first token yet; between passes SGLang's
        queue holds only online requests."""
        if self._view.waiting:
            return True
        return self._view.chunk is not None and not is_offline(self._view.chunk)

    def _offer(self, running_batch: ScheduleBatch) -> bool:
        """Offer as many offline requests as may run; False if none may."""
        scheduler, view = self._scheduler, self._view
        count = min(_MAX_OFFERED, scheduler.get_num_allocatable_reqs(len(running_batch.reqs)))
        limit = self._most_running
        if limit is not None:
            running = sum(is_offline(req) for req in (*running_batch.reqs, *view.elsewhere()))
            count = min(count, limit - running - (view.chunk is not None))
        if count <= 0:
            return False
        view.offer(self._waiting.take(count))
        return True

    def _release_offline_chunk(self) -> None:
        """Release a half-prefilled offline prompt: SGLang keeps one such prompt at a time,
        and would finish it before it looks at the waiting queue."""
        if self._view.can_take_chunk and is_offline(self._view.chunk):
            self._retraction.release(self._view.take_chunk())
            self._events["parked"] += 1

    def _make_room_for_online_chunk(self, running_batch: ScheduleBatch) -> None:
        """Free the memory of an online prompt's next chunk, for which SGLang does not wait."""
        req = self._view.chunk
        if req is None or is_offline(req):
            return
        remaining = len(req.origin_input_ids) + len(req.output_ids) - prefix_tokens(req)
        chunk = min(remaining, self._scheduler.chunked_prefill_size or remaining)
        while self._pools.headroom_tokens < chunk + self._scheduler.page_size:
            if not self._retraction.retract_one(running_batch):
                return
