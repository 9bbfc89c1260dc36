"""The engine as an online request finds it, for the figures that SGLang reports under its names.

Routers send a request where ``/v1/loads`` or the metrics show the least load. Offline requests give
way to it, so they are not in these figures; ``/coserve/load`` and ``coserve_*`` have them.
Without offline requests every figure is SGLang's.
"""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from sglang_coserve.srt.marks.request_marks import is_offline
from sglang_coserve.srt.monitoring.replica_load import HeldKv, LoadReporter
from sglang_coserve.srt.steps.batch_results import BatchResults
from sglang_coserve.srt.steps.kv_pools import KvPools

__all__ = ["OnlineLoadInquirer"]

Req = Any


class OnlineLoadInquirer:
    """See the module's docstring; has what SGLang's ``SchedulerLoadInquirer`` asks for."""

    def __init__(
        self, scheduler: Any, pools: KvPools, load: LoadReporter, throughput_steps: int
    ) -> None:
        """``throughput_steps`` are the decode steps after which SGLang measures its throughput."""
        self._scheduler = scheduler
        self._pools = pools
        self._load = load
        self._throughput = _OnlineThroughput(throughput_steps)

    def running_batch(self) -> Any:
        """Return something with the ``reqs`` of SGLang's running batch that are online."""
        return SimpleNamespace(reqs=_online(self._scheduler.running_batch.reqs))

    def waiting_queue(self) -> list[Req]:
        """Return those of SGLang's queue that are online."""
        return _online(self._scheduler.waiting_queue)

    def chunked_req(self) -> Req | None:
        """Return the unfinished prefill, if it is online."""
        chunk = self._scheduler.chunked_req
        return None if chunk is None or is_offline(chunk) else chunk

    def get_pool_stats(self, held: HeldKv | None = None) -> Any:
        """Return SGLang's ``PoolStats``, where what offline requests alone hold is evictable.

        ``held`` is who holds KV; without it that takes O(requests with KV + nodes of the radix
        cache above them).
        """
        stats = self._scheduler.pool_stats_observer.get_pool_stats()
        online, offline, tokens = held or self._load.held()
        if not offline:
            return stats
        changed = _less("full", stats, tokens.offline)
        if stats.is_hybrid_swa:
            changed |= _less("swa", stats, self._pools.held_in_window(offline))
        if stats.is_hybrid_ssm:
            num_requests = len(offline) + len(online)  # Each has as many states as any other.
            changed |= _less("mamba", stats, stats.mamba_num_used * len(offline) // num_requests)
        return replace(stats, **changed)

    def processed(self, results: BatchResults) -> None:
        """Note who got a token of a batch."""
        decodes, has_offline = results.online_decodes, results.gave_offline
        self._throughput.processed(decodes, time.perf_counter(), has_offline=has_offline)

    def put_into(self, stats: Any) -> None:
        """Let SGLang's ``SchedulerStats`` say what an online request finds."""
        counts = type(stats.num_running_reqs)
        has_priorities = self._scheduler.enable_priority_scheduling
        stats.num_running_reqs = counts.from_reqs(self.running_batch().reqs, has_priorities)
        stats.num_queue_reqs = counts.from_reqs(self.waiting_queue(), has_priorities)
        self.get_pool_stats().update_scheduler_stats(stats)
        if self._throughput.is_shared:
            running = stats.num_running_reqs.total
            stats.gen_throughput = self._throughput.per_s if running else 0.0


class _OnlineThroughput:
    """Generated tokens a second of online requests, measured as SGLang measures those of all.

    Over so many decode steps as it takes, counting those with online requests. A router that takes
    the throughput for the speed of an engine would else see another one where offline
    requests run.
    """

    def __init__(self, interval_steps: int) -> None:
        self._interval_steps = interval_steps
        self._steps = self._tokens = 0
        self._began_s = time.perf_counter()
        self._has_offline = self._had_offline = False
        self.per_s = 0.0

    @property
    def is_shared(self) -> bool:
        """Whether offline requests got tokens in this interval or the last one."""
        return self._has_offline or self._had_offline

    def processed(self, online_decodes: int, now_s: float, *, has_offline: bool) -> None:
        """Note the tokens of one step."""
        self._has_offline |= has_offline
        if not online_decodes:
            return
        self._tokens += online_decodes
        self._steps += 1
        if self._steps >= self._interval_steps:
            self.per_s = self._tokens / max(now_s - self._began_s, 1e-9)
            self._began_s, self._steps, self._tokens = now_s, 0, 0
            self._had_offline, self._has_offline = self._has_offline, False


def _online(reqs: list[Req]) -> list[Req]:
    return [req for req in reqs if not is_offline(req)]


def _less(pool: str, stats: Any, tokens: int) -> dict[str, Any]:
    """Return the figures of a pool of which so many used tokens are evictable."""
    usage = "mamba_usage" if pool == "mamba" else f"{pool}_token_usage"
    used = getattr(stats, f"{pool}_num_used")
    tokens = min(tokens, used)
    share = (used - tokens) / used if used else 0.0
    return {
        f"{pool}_num_used": used - tokens,
        f"{pool}_evictable_size": getattr(stats, f"{pool}_evictable_size") + tokens,
        usage: getattr(stats, usage) * share,
    }
