"""Retracts offline requests: their KV goes to the radix cache, and they wait again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

from sglang_coserve.srt import compat
from sglang_coserve.srt.marks.request_marks import is_offline
from sglang_coserve.srt.steps.engine_queues import EngineQueues
from sglang_coserve.srt.steps.kv_pools import KvPools
from sglang_coserve.srt.steps.paused_requests import restore_penalties

Req = Any
ScheduleBatch = Any

Prefill = Callable[[ScheduleBatch], Any]
"""SGLang's admission: takes the running batch, returns a plan with a prefill batch or none."""


class OfflineRetraction:
    """Retracts offline requests for online ones, before SGLang lets those wait or retracts them."""

    def __init__(
        self,
        scheduler: Any,
        pools: KvPools,
        queues: EngineQueues,
        events: Counter[str],
        answer_aborted: Callable[[Req], None],
    ) -> None:
        """``answer_aborted`` ends a request that is aborted in no batch."""
        self._scheduler = scheduler
        self._answer_aborted = answer_aborted
        self._pools = pools
        self._queues = queues
        self._events = events

    # --- Make room for online requests ---------------------------------------------------

    def admit(self, running_batch: ScheduleBatch, prefill: Prefill) -> Any:
        """Run SGLang's admission; retract offline requests while an online request does not fit."""
        plan = prefill(running_batch)
        while self._online_is_starved(plan) and self.retract_one(plan.running_batch):
            plan = prefill(plan.running_batch)
        if plan.batch_to_run is not None:
            restore_penalties(plan.batch_to_run)
        return plan

    def _online_is_starved(self, plan: Any) -> bool:
        """Return whether there is no batch because an online request did not fit."""
        if plan.batch_to_run is not None or not self._queues.has_others_waiting:
            return False
        # Parked and paused requests hold memory, too, so that an empty batch may have no room.
        return compat.may_be_full(plan.running_batch)

    def make_room_for_decodes(self, batch: ScheduleBatch) -> None:
        """Retract offline requests before a decode step, so that SGLang need not choose victims."""
        elsewhere = len(self._queues.elsewhere())
        if self._has_slots(batch.batch_size() + elsewhere):
            return
        compat.drop_ended(batch)
        retracted = False
        # SGLang aborts a single request without room; paused ones are to give way to it, too.
        while batch.batch_size() > (0 if len(self._queues.paused_requests) else 1) and not (
            batch.check_decode_mem()
            # Other micro-batches come next, and cannot retract requests of this one.
            and (not elsewhere or self._has_slots(batch.batch_size() + elsewhere))
        ):
            if not self.retract_one(batch):
                break
            retracted = True
        if retracted and batch.reqs:
            # As after any retraction, expect longer outputs; otherwise the retracted
            # requests would be admitted at once and retracted again. An empty batch has no outputs
            # to judge by, and SGLang would expect none.
            tracker = self._scheduler.new_token_ratio_tracker
            tracker.current = tracker.estimate_new_token_ratio_after_retract(batch.reqs)

    def _has_slots(self, requests: int) -> bool:
        """Return whether there is KV for one more token of so many requests, each in a new page."""
        return bool(self._pools.headroom_tokens >= requests * self._scheduler.page_size)

    def rids_blocking_adapters(self, requests: Iterable[Req]) -> set[str]:
        """Return the ids of those to retract for the LoRA adapter of the next online request.

        A batch has slots for a few adapters, where the bare model counts as one, and
        SGLang skips a request that needs one more. Offline requests whose adapters fit
        beside the online ones are kept. O(requests) if LoRA is enabled.
        """
        if not self._scheduler.enable_lora:
            return set()
        first = next((req for req in self._queues.waiting_in_turn if not is_offline(req)), None)
        if first is None:
            return set()
        fits = self._scheduler.tp_worker.model_runner.lora_manager.validate_lora_batch
        kept = {first.lora_id}
        offline: dict[str | None, list[str]] = {}
        for req in requests:
            if is_offline(req):
                offline.setdefault(req.lora_id, []).append(req.rid)
            else:
                kept.add(req.lora_id)
        if not fits(kept):
            return set()  # Online requests alone take the slots, so it has to wait.
        in_the_way: set[str] = set()
        for lora_id, rids in offline.items():
            if fits(kept | {lora_id}):
                kept.add(lora_id)
            else:
                in_the_way.update(rids)
        return in_the_way

    # --- Retract requests --------------------------------------------------------------------

    def retract_one(self, running_batch: ScheduleBatch) -> bool:
        """Retract the last parked offline request, else the last paused, else the last running one.

        Returns False if there is none.
        """
        paused_requests = self._queues.paused_requests
        if victims := paused_requests.parked or paused_requests.paused:
            self.retract({victims[-1].rid}, running_batch)
            running_batch.batch_is_full = False
            return True
        if not any(is_offline(req) for req in running_batch.reqs):
            return False
        compat.drop_ended(running_batch)  # Finished requests have no KV left to release.
        victim = next((req for req in reversed(running_batch.reqs) if is_offline(req)), None)
        if victim is None:
            return False
        self._retract_decodes(running_batch, {victim.rid})
        return True

    def retract(self, rids: Collection[str], running_batch: ScheduleBatch) -> None:
        """Retract the requests in ``rids``, whatever their state; unknown ids are ignored."""
        if not rids:
            return
        unfinished = self._queues.paused_requests.unpark_all(lambda req: req.rid in rids)
        if self._queues.chunk is not None and self._queues.chunk.rid in rids:
            unfinished.append(self._queues.take_chunk())
        for req in unfinished:
            self._events["retracted"] += self.release(req)
        self._retract_decodes(running_batch, rids)
        self._retract_decodes(self._queues.paused_requests.batch, rids)

    def _retract_decodes(self, batch: ScheduleBatch, rids: Collection[str]) -> None:
        keep = [i for i, req in enumerate(batch.reqs) if req.rid not in rids]
        gone = [req for req in batch.reqs if req.rid in rids]
        for req in gone:
            self._events["retracted"] += self.release(req)
        if gone:
            batch.filter_batch(keep_indices=keep)
            batch.batch_is_full = False

    def end_aborted(self) -> None:
        """End the paused requests that have ended or are aborted.

        Under overlap scheduling the result of the last step may end a request paused since. An
        aborted request would hold its KV until offline work has time for a step.
        """
        batch = self._queues.paused_requests.batch
        if batch.reqs:
            batch.filter_batch()
            aborted = {req.rid for req in batch.reqs if req.to_finish is not None}
            self._retract_decodes(batch, aborted)

    def release(self, req: Req) -> bool:
        """Release the KV of a request that is in no batch, or about to leave it, and requeue it.

        An aborted request ends instead, and the result is False.
        """
        is_aborted = req.to_finish is not None
        compat.release_for_requeue(req, self._scheduler.tree_cache)
        if is_aborted:
            self._answer_aborted(req)
        else:
            self._queues.requeue(req)
        return not is_aborted

    def release_unfinished(self, batch: ScheduleBatch, num_prefills: int) -> list[Req]:
        """Release the requests of a prepared batch that has not run to its end.

        What they had before it goes to the radix cache; if layers keep a state (Mamba), nothing
        does, as some layers have advanced theirs. Under overlap scheduling, some of its decodes may
        have ended and have no KV. Those that were aborted meanwhile are not requeued, but returned.
        """
        cache, aborted = self._scheduler.tree_cache, []
        has_state = isinstance(self._scheduler.req_to_token_pool, HybridReqToTokenPool)
        self._scheduler.running_batch.batch_is_full = False
        for row, req in enumerate(batch.reqs):
            if not compat.holds_kv(req):
                continue
            is_prefill = row < num_prefills
            tokens = compat.prefix_tokens(req) if is_prefill else compat.computed_tokens(req) - 1
            keeps = tokens > 0 and not has_state
            if keeps:
                compat.undo_allocation(req, cache, tokens)
            compat.release_for_requeue(req, cache, keeps=keeps)
            if req.to_finish is None:
                self._queues.requeue(req)
            else:
                aborted.append(req)
        return aborted
