"""SGLang's scheduler with a second class of requests behind the first.

Offline requests wait in a queue of their own.  A scheduling pass offers some of
them to SGLang only when no online request is waiting or being prefilled, behind
everything else; and takes back what was not admitted.  When online requests need
memory, offline ones give theirs up: their KV goes to the radix cache and they
wait again, progress kept.  Without offline requests every override hands over to
SGLang after a constant-time test.

Decisions here depend on neither clock nor chance, so tensor-parallel ranks stay
in step.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.scheduler import Scheduler

from sglang_coserve.config import CoserveConfig
from sglang_coserve.srt.compat import lowest_priority, release_for_requeue
from sglang_coserve.srt.offline_waiting import OfflineWaiting
from sglang_coserve.srt.request_class import is_offline

__all__ = ["INIT_INFO_KEY", "CoserveScheduler", "config_of"]

logger = logging.getLogger(__name__)

INIT_INFO_KEY = "coserve"
"""Where the scheduler's start-up handshake says that co-serving is in place."""

_MAX_OFFERED = 128
"""Offline requests offered to SGLang in one pass: its admission loop is linear in them."""

Req = Any
ScheduleBatch = Any


def config_of(server_args: Any) -> CoserveConfig:
    """Return the co-serving settings that travel on SGLang's ``ServerArgs``."""
    config = getattr(server_args, "_coserve", None)
    assert isinstance(config, CoserveConfig), "ServerArgs carries no co-serving settings"
    return config


class CoserveScheduler(Scheduler):
    """See the module's docstring. Runs in the scheduler process, one per rank."""

    # State of SGLang's that is assigned here too.
    waiting_queue: list[Req]
    chunked_req: Req | None

    def init_running_status(self) -> None:
        """Set up the queues; called by SGLang while it constructs the scheduler."""
        super().init_running_status()
        self._coserve_config = config_of(self.server_args)
        self._offline_waiting = OfflineWaiting()
        self._num_offered = 0
        self._offline_filled_batch = False
        self._offline_counts: Counter[str] = Counter()

    # --- Requests arrive and leave -------------------------------------------------------

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        # A request that failed validation takes SGLang's way out whatever its class.
        if not is_offline(req) or req.to_finish is not None:
            super()._add_request_to_queue(req, is_retracted)
            self._move_behind_offered(req)
            return
        if self.enable_priority_scheduling:
            req.priority = lowest_priority(self.schedule_low_priority_values_first)
        if not self._set_or_validate_priority(req):
            return
        req.time_stats.set_wait_queue_entry_time()
        if req.retraction_count:
            self._offline_waiting.put_back(req)
            self._offline_counts["put_back"] += 1
        else:
            self._offline_waiting.append(req)
            self._offline_counts["received"] += 1

    def _move_behind_offered(self, req: Req) -> None:
        """Let an online request that becomes ready during a pass go before the offline ones."""
        if self._num_offered and self.waiting_queue and self.waiting_queue[-1] is req:
            self.waiting_queue.pop()
            self.waiting_queue.insert(len(self.waiting_queue) - self._num_offered, req)

    def abort_request(self, recv_req: AbortReq) -> None:
        """Abort requests in every state; the waiting offline ones are ours to find."""
        super().abort_request(recv_req)
        aborted = self._offline_waiting.remove_if(
            lambda req: recv_req.abort_all or req.rid.startswith(recv_req.rid)
        )
        for req in aborted:
            self.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid), req)
        self._offline_counts["aborted_waiting"] += len(aborted)

    # --- One scheduling pass -------------------------------------------------------------

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> Any:
        """Admit online requests as SGLang does; offline ones only when none of them waits."""
        self._offline_waiting.start_pass()
        if self._online_waits():
            self._park_offline_chunk()
            self._make_room_for_online_chunk(running_batch)
        elif self._offline_waiting.has_ready:
            self._offer_offline(running_batch)
        if self._offline_filled_batch:
            running_batch.batch_is_full = False
            self._offline_filled_batch = False

        plan = super().get_new_batch_prefill(running_batch)
        while self._online_is_starved(plan) and self._evict_offline(plan.running_batch):
            plan = super().get_new_batch_prefill(plan.running_batch)

        if self._num_offered:
            self._withdraw_offer(plan.running_batch)
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
        offered = self._offline_waiting.take(count)
        self.waiting_queue.extend(offered)
        self._num_offered = len(offered)

    def _withdraw_offer(self, running_batch: ScheduleBatch) -> None:
        """Take back what the pass did not admit, and the full mark it may have left."""
        left = [req for req in self.waiting_queue if is_offline(req)]
        self._offline_counts["admitted"] += self._num_offered - len(left)
        self._num_offered = 0
        if left:
            self.waiting_queue = [req for req in self.waiting_queue if not is_offline(req)]
            self._offline_waiting.untake(left)
        # Full for an offline request is not full for an online one, which may be smaller
        # and has offline requests to displace.
        self._offline_filled_batch = running_batch.batch_is_full

    # --- Offline gives way ---------------------------------------------------------------

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

    def _online_is_starved(self, plan: Any) -> bool:
        """True when the pass produced nothing because an online request did not fit."""
        return (
            plan.batch_to_run is None
            and plan.running_batch.batch_is_full
            and len(self.waiting_queue) > self._num_offered
        )

    def _evict_offline(self, running_batch: ScheduleBatch) -> bool:
        """Release the offline decode that was admitted last; False when there is none."""
        if not any(is_offline(req) for req in running_batch.reqs):
            return False
        running_batch.filter_batch()  # A finished request has nothing left to release.
        reqs = running_batch.reqs
        victim = next((i for i in reversed(range(len(reqs))) if is_offline(reqs[i])), None)
        if victim is None:
            return False
        self._release(reqs[victim])
        running_batch.filter_batch(keep_indices=[i for i in range(len(reqs)) if i != victim])
        running_batch.batch_is_full = False
        self._offline_counts["evicted"] += 1
        return True

    def _release(self, req: Req) -> None:
        release_for_requeue(req, self.tree_cache)
        self._add_request_to_queue(req, is_retracted=True)

    def update_running_batch(self, batch: ScheduleBatch) -> Any:
        """Before a decode step, evict offline requests rather than let SGLang pick victims."""
        if self._kv_headroom_tokens() < batch.batch_size() * self.page_size:
            batch.filter_batch()
            evicted = False
            while batch.batch_size() > 1 and not batch.check_decode_mem():
                if not self._evict_offline(batch):
                    break
                evicted = True
            if evicted:
                # As after any retraction: expect longer outputs, or the evicted
                # requests come straight back and are evicted again.
                tracker = self.new_token_ratio_tracker
                tracker.current = tracker.estimate_new_token_ratio_after_retract(batch.reqs)
        return super().update_running_batch(batch)

    def _kv_headroom_tokens(self) -> int:
        return int(
            self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size()
        )

    # --- What SGLang asks about ----------------------------------------------------------

    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        """Count waiting offline requests as work, except for the health check, which asks
        whether a batch is about to report back."""
        idle = bool(super().is_fully_idle(for_health_check))
        return idle and (for_health_check or not self._offline_waiting)

    def get_init_info(self) -> dict[str, Any]:
        """Add the mark by which the launcher knows that this scheduler is in place."""
        info: dict[str, Any] = super().get_init_info()
        info[INIT_INFO_KEY] = {"scheduler": type(self).__name__}
        return info

    def get_internal_state(self, recv_req: Any) -> Any:
        """Add the state of the offline class, in plain values, under ``coserve``."""
        output = super().get_internal_state(recv_req)
        # The batch sheds finished requests only when it runs next.
        running = [req for req in self.running_batch.reqs if not req.finished()]
        num_offline = sum(is_offline(req) for req in running)
        prefilling = self.chunked_req
        output.internal_state[INIT_INFO_KEY] = {
            "config": self._coserve_config.to_dict(),
            "online": {
                "waiting": len(self.waiting_queue),
                "running": len(running) - num_offline,
            },
            "offline": {
                "waiting": len(self._offline_waiting),
                "running": num_offline,
                "prefilling": int(prefilling is not None and is_offline(prefilling)),
                **{name: self._offline_counts[name] for name in _COUNTS},
            },
        }
        return output


_COUNTS = ("received", "admitted", "parked", "evicted", "put_back", "aborted_waiting")
