"""SGLang's scheduler with a second class of requests behind the first.

Offline requests wait apart from SGLang's queue, where a subclass decides when
they are offered for admission.  What the subclasses share is here: how offline
requests arrive, are aborted and give memory up (their KV goes to the radix cache
and they wait again, progress kept), and what SGLang is told about them.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.scheduler import Scheduler

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.baseline import Baseline
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.offline_rate import expected_tokens_per_s
from sglang_coserve.srt.arrival_time import arrival_s
from sglang_coserve.srt.compat import (
    check_logit_processor,
    fill_token_ids_logprobs,
    lowest_priority,
    refused_request,
    release_for_requeue,
)
from sglang_coserve.srt.exporter import Exporter
from sglang_coserve.srt.grammar_cache import GrammarCache
from sglang_coserve.srt.kv_checkpoint.hooks import KvCheckpointing
from sglang_coserve.srt.offline_marks import restore_generated
from sglang_coserve.srt.penalties import restore_penalties
from sglang_coserve.srt.request_ledger import RequestLedger
from sglang_coserve.srt.request_marks import is_offline
from sglang_coserve.srt.slo_watch import SloWatch
from sglang_coserve.srt.usable_logits import end_unusable

__all__ = ["EXPECTED_RATE_KEY", "INIT_INFO_KEY", "CoserveScheduler", "config_of"]

INIT_INFO_KEY = "coserve"
"""Where the scheduler's start-up handshake says that co-serving is in place."""

EXPECTED_RATE_KEY = "expected_offline_tokens_per_s"
"""And there, what offline requests alone would get of the engine."""

Req = Any
ScheduleBatch = Any

logger = logging.getLogger(__name__)


def config_of(server_args: Any) -> CoserveConfig:
    """Return the co-serving settings that travel on SGLang's ``ServerArgs``."""
    config = getattr(server_args, "_coserve", None)
    assert isinstance(config, CoserveConfig), "ServerArgs carries no co-serving settings"
    return config


class CoserveScheduler(Scheduler, ABC):
    """See the module's docstring. Runs in the scheduler process, one per rank."""

    _count_names: ClassVar[tuple[str, ...]] = (
        *("received", "admitted", "parked", "evicted", "put_back", "aborted_waiting"),
    )

    # State of SGLang's that is assigned here too.
    waiting_queue: list[Req]
    chunked_req: Req | None
    chunked_prefill_size: int | None

    def init_running_status(self) -> None:
        """Set up the queues; called by SGLang while it constructs the scheduler."""
        super().init_running_status()
        self._coserve_config = config_of(self.server_args)
        self._offered: list[Req] = []
        self._offline_counts: Counter[str] = Counter()
        self._ledger = RequestLedger(self.tree_cache)
        self._kv = KvCheckpointing(self.tree_cache)
        wants_metrics = self.server_args.enable_metrics and self.ps.tp_rank == 0
        self._exporter = Exporter(self.server_args.served_model_name) if wants_metrics else None

    def init_grammar_manager(self) -> None:
        """Let SGLang set up grammars; bound how many it keeps."""
        super().init_grammar_manager()
        if self.grammar_manager.grammar_backend is not None:
            self.grammar_manager.grammar_backend.cache = GrammarCache()

    def init_chunked_prefill(self) -> None:
        """Begin to watch online requests, now that the size of a step is known."""
        super().init_chunked_prefill()
        self._slo_watch = SloWatch(
            self._coserve_config, self._baseline(), warns=self.ps.tp_rank == 0
        )

    def _baseline(self) -> Baseline | None:
        """Return an online-only engine to compare with; None without a model of its steps."""
        return None

    # --- Requests arrive and leave -------------------------------------------------------

    def handle_generate_request(self, recv_req: Any) -> None:
        """Take a request in; one that SGLang fails on is refused, and no other is harmed."""
        try:
            check_logit_processor(recv_req)
            super().handle_generate_request(recv_req)
        except Exception as error:
            logger.exception("request %s could not be taken in", recv_req.rid)
            self._refuse(recv_req, f"the engine cannot take this request: {error}")

    def _refuse(self, recv_req: Any, message: str) -> None:
        """Answer a request that never became one of SGLang's."""
        req = refused_request(recv_req, self.tokenizer, self.model_config.vocab_size, message)
        self.init_req_max_new_tokens(req)
        self._add_request_to_queue(req)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        now_s = self._now_s()
        info = self._ledger.add(req, self._arrival_s(req, now_s), now_s)
        if info.is_online and not is_retracted:
            is_matched = self._slo_watch.has_baseline and req.to_finish is None
            self._slo_watch.arrived(info, self._ledger.match_prefix(req) if is_matched else 0)
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
        restore_generated(req, self.model_config.think_end_ids)
        self._enqueue_offline(req)
        self._offline_counts["put_back" if req.retraction_count else "received"] += 1

    @abstractmethod
    def _enqueue_offline(self, req: Req) -> None:
        """Let an offline request wait; ``retraction_count`` tells whether it ran before.

        One that ran must not be admitted again in the same pass: under overlap
        scheduling it would take the result of its last step, still queued, for its own.
        """

    @abstractmethod
    def _dequeue_offline(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Forget and return the waiting offline requests that match; O(waiting)."""

    @abstractmethod
    def _num_offline_waiting(self) -> int:
        """Count the offline requests that are neither running nor offered."""

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        """Note what the batch's online requests got, and save the KV of its offline ones."""
        if batch.return_logprob:
            fill_token_ids_logprobs(result.logits_output)
        end_unusable(batch, result)
        super().process_batch_result(batch, result)
        self._kv.processed(batch)
        self._slo_watch.results(batch.reqs, time.perf_counter())
        self._publish()

    def _now_s(self) -> float:
        """Return the time by which this rank decides."""
        return time.perf_counter()

    def _arrival_s(self, req: Req, now_s: float) -> float:
        """Return when a request that is new now arrived at the server."""
        return arrival_s(req, now_s)

    def _forget(self, rid: str) -> None:
        """Drop what is kept of a request that has ended."""
        self._ledger.forget(rid)
        self._slo_watch.forget(rid)
        self._kv.forget(rid)

    def on_idle(self) -> None:
        """Drop what is left of requests that SGLang refused by itself."""
        super().on_idle()
        self._publish()
        if len(self._ledger) and self.is_fully_idle():
            for rid in self._ledger.rids():
                self._forget(rid)

    def _move_behind_offered(self, req: Req) -> None:
        """Let an online request that becomes ready during a pass go before the offline ones."""
        if self._offered and self.waiting_queue and self.waiting_queue[-1] is req:
            self.waiting_queue.pop()
            self.waiting_queue.insert(len(self.waiting_queue) - len(self._offered), req)

    def abort_request(self, recv_req: AbortReq) -> None:
        """Abort requests in every state; the waiting offline ones are ours to find."""
        waiting = {req.rid for req in self.waiting_queue}
        super().abort_request(recv_req)
        for rid in waiting.difference(req.rid for req in self.waiting_queue):
            self._forget(rid)
        aborted = self._dequeue_offline(
            lambda req: recv_req.abort_all or req.rid.startswith(recv_req.rid)
        )
        for req in aborted:
            self.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid), req)
        self._offline_counts["aborted_waiting"] += len(aborted)

    # --- Offline gives way ---------------------------------------------------------------

    def _admit(self, running_batch: ScheduleBatch) -> Any:
        """Let SGLang admit; evict offline requests while an online one does not fit."""
        plan = super().get_new_batch_prefill(running_batch)
        while self._online_is_starved(plan) and self._evict_offline(plan.running_batch):
            plan = super().get_new_batch_prefill(plan.running_batch)
        if plan.batch_to_run is not None:
            restore_penalties(plan.batch_to_run)
        return plan

    def _online_is_starved(self, plan: Any) -> bool:
        """True when the pass produced nothing because an online request did not fit."""
        if plan.batch_to_run is not None or len(self.waiting_queue) <= len(self._offered):
            return False
        # With a hierarchical cache SGLang never calls a batch without rows full, but parked
        # and paused rows hold memory too.
        is_full = plan.running_batch.batch_is_full
        return bool(is_full or (self.enable_hierarchical_cache and plan.running_batch.is_empty()))

    def _withdraw_offer(self) -> list[Req]:
        """Take the offered requests that were not admitted out of SGLang's queue; return them."""
        # By identity: SGLang's queue also holds offline requests that failed validation.
        offered = {id(req) for req in self._offered}
        left = [req for req in self.waiting_queue if id(req) in offered]
        if left:
            self.waiting_queue = [req for req in self.waiting_queue if id(req) not in offered]
        self._offline_counts["admitted"] += len(offered) - len(left)
        self._offered = []
        return left

    def _evict_offline(self, running_batch: ScheduleBatch) -> bool:
        """Release the offline decode that was admitted last; False when there is none."""
        if not any(is_offline(req) for req in running_batch.reqs):
            return False
        running_batch.filter_batch()  # A finished request has nothing left to release.
        victim = next((req for req in reversed(running_batch.reqs) if is_offline(req)), None)
        if victim is None:
            return False
        self._evict_rows(running_batch, {victim.rid})
        return True

    def _rids_in_the_way(self, rows: Iterable[Req]) -> set[str]:
        """Return those of ``rows`` to evict for the LoRA adapter of the next online request.

        A batch has places for a few adapters, the bare model counting as one, and
        SGLang passes over a request that needs one more. Of the offline rows those
        stay whose adapters fit beside the online ones. O(rows) if LoRA is enabled.
        """
        if not self.enable_lora:
            return set()
        first = next((req for req in self.waiting_queue if not is_offline(req)), None)
        if first is None:
            return set()
        fits = self.tp_worker.model_runner.lora_manager.validate_lora_batch
        kept = {first.lora_id}
        offline: dict[str | None, list[str]] = {}
        for req in rows:
            if is_offline(req):
                offline.setdefault(req.lora_id, []).append(req.rid)
            else:
                kept.add(req.lora_id)
        if not fits(kept):
            return set()  # It is for other online requests that it has to wait.
        in_the_way: set[str] = set()
        for lora_id, rids in offline.items():
            if fits(kept | {lora_id}):
                kept.add(lora_id)
            else:
                in_the_way.update(rids)
        return in_the_way

    def _evict_rows(self, batch: ScheduleBatch, rids: Collection[str]) -> None:
        """Release the rows named in ``rids``; others may be named too."""
        keep = [i for i, req in enumerate(batch.reqs) if req.rid not in rids]
        gone = [req for req in batch.reqs if req.rid in rids]
        for req in gone:
            self._release(req)
        if gone:
            batch.filter_batch(keep_indices=keep)
            batch.batch_is_full = False
        self._offline_counts["evicted"] += len(gone)

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
        return idle and (for_health_check or not self._num_offline_waiting())

    def get_init_info(self) -> dict[str, Any]:
        """Add the mark by which the launcher knows that this scheduler is in place."""
        info: dict[str, Any] = super().get_init_info()
        info[INIT_INFO_KEY] = {
            "scheduler": type(self).__name__,
            EXPECTED_RATE_KEY: self._expected_offline_rate(),
        }
        return info

    def _expected_offline_rate(self) -> float | None:
        """Return the tokens a second that offline requests would get now; None if unknown."""
        model = self._latency_model()
        if model is None:
            return None
        limit = self._coserve_config.offline_max_running or self.max_running_requests
        return expected_tokens_per_s(
            model,
            kv_tokens=self.max_total_num_tokens,
            max_rows=min(limit, self.max_running_requests),
            chunk_tokens=self.chunked_prefill_size or self.max_prefill_tokens,
        )

    @abstractmethod
    def _latency_model(self) -> LatencyModel | None:
        """Return what predicts iterations now; None if nothing does."""

    def get_internal_state(self, recv_req: Any) -> Any:
        """Add the state of both classes, in plain values, under ``coserve``."""
        output = super().get_internal_state(recv_req)
        output.internal_state[INIT_INFO_KEY] = {
            "config": self._coserve_config.to_dict(),
            **self._state(),
        }
        return output

    def _state(self) -> dict[str, Any]:
        # The batch sheds finished requests only when it runs next.
        running = [req for req in self.running_batch.reqs if not req.finished()]
        num_offline = sum(is_offline(req) for req in running)
        prefilling = self.chunked_req
        return {
            "slo": self._slo_watch.report(time.perf_counter()),
            "online": {
                "waiting": len(self.waiting_queue),
                "running": len(running) - num_offline,
            },
            "offline": {
                "waiting": self._num_offline_waiting(),
                "running": num_offline,
                "prefilling": int(prefilling is not None and is_offline(prefilling)),
                **self._events(),
            },
            "kv_checkpoint": self._kv.stats().to_dict(),
        }

    def _events(self) -> dict[str, int]:
        return {name: self._offline_counts[name] for name in self._count_names}

    def _publish(self) -> None:
        """Renew the Prometheus metrics, where they are wanted and due."""
        if self._exporter is not None and self._exporter.is_due(now_s := time.perf_counter()):
            self._exporter.publish(self._state(), self._events(), now_s)
