"""SGLang's scheduler with offline rows that keep their KV outside of its batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from sglang_coserve.srt.scheduler import CoserveScheduler
from sglang_coserve.srt.set_aside import HeldRows, SetAside

__all__ = ["HoldingScheduler"]

Req = Any
ScheduleBatch = Any


class HoldingScheduler(CoserveScheduler):
    """Parks unfinished prefills and pauses decodes, and takes their memory back.

    Whatever SGLang does to all rows, it does to these too: it counts their KV, keeps
    the places of their adapters, and retracts them when generation is paused.
    """

    _count_names = (*CoserveScheduler._count_names, "paused", "resumed")

    def init_running_status(self) -> None:
        """Set up the rows that hold KV outside SGLang's batches: none."""
        super().init_running_status()
        self._aside = SetAside()

    def _rows_with_kv(self, running_batch: ScheduleBatch) -> Iterator[Req]:
        yield from running_batch.reqs
        yield from self._aside.reqs
        if self.chunked_req is not None:
            yield self.chunked_req

    def _park_chunk(self) -> None:
        req = self.chunked_req
        assert req is not None
        if req is self._pending_chunked_abort_req:
            return
        self._aside.park(req)
        self.chunked_req = None
        self._offline_counts["parked"] += 1

    # --- Memory --------------------------------------------------------------------------

    def _evict_offline(self, running_batch: ScheduleBatch) -> bool:
        """Release one offline row that a plan left in memory: parked, paused, then running."""
        victims = self._aside.parked or self._aside.paused
        if not victims:
            return super()._evict_offline(running_batch)
        self._evict({victims[-1].rid}, running_batch)
        running_batch.batch_is_full = False
        return True

    def _evict(self, rids: Collection[str], running_batch: ScheduleBatch) -> None:
        """Release the rows named in ``rids``, wherever they are."""
        if not rids:
            return
        unfinished = self._aside.unpark_all(lambda req: req.rid in rids)
        if self.chunked_req is not None and self.chunked_req.rid in rids:
            unfinished.append(self.chunked_req)
            self.chunked_req = None
        for req in unfinished:
            self._release(req)
        self._offline_counts["evicted"] += len(unfinished)
        self._evict_rows(running_batch, rids)
        self._aside.take_paused(self._evict_rows, rids)

    # --- What SGLang does to all rows ----------------------------------------------------

    def _can_schedule_lora_req(self, req: Req, running_loras: set[str | None]) -> bool:
        """Keep the places of the adapters whose rows are to come back into the batch."""
        kept = {row.lora_id for row in self._aside.reqs}
        return bool(super()._can_schedule_lora_req(req, running_loras | kept))

    def init_invariant_checker(self) -> None:
        """Let the memory check of a busy engine count parked and paused rows."""
        super().init_invariant_checker()
        self.invariant_checker.get_running_batch = lambda: HeldRows(
            self._rows_with_kv(self.running_batch),
            counted=self.last_batch.reqs if self.last_batch else (),
        )

    def pause_generation(self, recv_req: Any) -> None:
        """Let SGLang retract parked and paused requests with the running ones."""
        if recv_req.mode != "in_place":
            self.running_batch.reqs = self.running_batch.reqs + self._aside.take_all()
        super().pause_generation(recv_req)
