"""Offline requests first come, first served, whenever no online request waits.

A scheduling pass offers some of them to SGLang only when no online request is
waiting or being prefilled, behind everything else, and takes back what was not
admitted.  Without offline requests every override hands over to SGLang after a
constant-time test.  Decisions depend on neither clock nor chance, so
tensor-parallel ranks stay in step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.errors import CoserveError
from sglang_coserve.srt.latency_source import known_latency_model
from sglang_coserve.srt.offline_waiting import OfflineWaiting
from sglang_coserve.srt.request_marks import is_offline
from sglang_coserve.srt.scheduler import CoserveScheduler

__all__ = ["FifoScheduler"]

_MAX_OFFERED = 128
"""Offline requests offered to SGLang in one pass: its admission loop is linear in them."""

Req = Any
ScheduleBatch = Any


class FifoScheduler(CoserveScheduler):
    """See the module's docstring."""

    def init_running_status(self) -> None:
        """Set up the queue; called by SGLang while it constructs the scheduler."""
        super().init_running_status()
        self._offline_waiting = OfflineWaiting()
        self._offline_filled_batch = False

    def _enqueue_offline(self, req: Req) -> None:
        if req.retraction_count:
            self._offline_waiting.put_back(req)
        else:
            self._offline_waiting.append(req)

    def _dequeue_offline(self, matches: Callable[[Req], bool]) -> list[Req]:
        return self._offline_waiting.remove_if(matches)

    def _num_offline_waiting(self) -> int:
        return len(self._offline_waiting)

    def _latency_model(self) -> LatencyModel | None:
        # Nothing here depends on it, and the start must not: it is for expected rates alone.
        with suppress(CoserveError):
            return known_latency_model(self, self._coserve_config)
        return None

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        """Forget who ended."""
        super().process_batch_result(batch, result)
        for req in batch.reqs:
            if req.finished():
                self._forget(req.rid)

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> Any:
        """Admit online requests as SGLang does; offline ones only when none of them waits."""
        self._offline_waiting.start_pass()
        if self._online_waits():
            self._park_offline_chunk()
            self._make_room_for_online_chunk(running_batch)
            if in_the_way := self._rids_in_the_way(running_batch.reqs):
                running_batch.filter_batch()  # A finished request has nothing left to release.
                self._evict_rows(running_batch, in_the_way)
        elif self._offline_waiting.has_ready:
            self._offer_offline(running_batch)
        if self._offline_filled_batch:
            running_batch.batch_is_full = False
            self._offline_filled_batch = False

        plan = self._admit(running_batch)
        if self._offered:
            self._offline_waiting.untake(self._withdraw_offer())
            # Full for an offline request is not full for an online one, which may be smaller
            # and has offline requests to displace.
            self._offline_filled_batch = plan.running_batch.batch_is_full
        return plan

    def _online_waits(self) -> bool:
        """True when an online request has no first token yet; between passes the stock
        queue holds only online requests."""
        if self.waiting_queue:
            return True
        return self.chunked_req is not None and not is_offline(self.chunked_req)

    def _offer_offline(self, running_batch: ScheduleBatch) -> None:
        """Put offline requests behind SGLang's waiting queue for the coming pass."""
        count = min(_MAX_OFFERED, self.get_num_allocatable_reqs(len(running_batch.reqs)))
        limit = self._coserve_config.offline_max_running
        if limit is not None:
            running = sum(is_offline(req) for req in running_batch.reqs)
            count = min(count, limit - running - (self.chunked_req is not None))
        if count <= 0:
            return
        self._offered = self._offline_waiting.take(count)
        self.waiting_queue.extend(self._offered)

    def _park_offline_chunk(self) -> None:
        """Release a half-prefilled offline prompt: SGLang keeps one such prompt at a time,
        and would finish it before it looks at the waiting queue."""
        req = self.chunked_req
        if req is None or not is_offline(req) or req is self._pending_chunked_abort_req:
            return
        self.chunked_req = None
        self._release(req)
        self._offline_counts["parked"] += 1

    def _make_room_for_online_chunk(self, running_batch: ScheduleBatch) -> None:
        """Free the memory of an online prompt's next chunk, for which SGLang does not wait."""
        req = self.chunked_req
        if req is None or is_offline(req):
            return
        remaining = len(req.origin_input_ids) + len(req.output_ids) - len(req.prefix_indices)
        chunk = min(remaining, self.chunked_prefill_size or remaining)
        while self._kv_headroom_tokens() < chunk + self.page_size:
            if not self._evict_offline(running_batch):
                return
