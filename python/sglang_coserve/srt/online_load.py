"""The engine as an online request finds it, for the figures that SGLang reports under its names.

Routers send a request where ``/v1/loads`` or the metrics show the least load. Offline rows give
way to it, so they are not in these figures; ``/coserve/load`` and ``coserve_*`` have them.
Without offline requests every figure is SGLang's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from sglang_coserve.srt.kv_pools import KvPools
from sglang_coserve.srt.request_ledger import RequestLedger
from sglang_coserve.srt.request_marks import is_offline

__all__ = ["OnlineLoad"]

Req = Any


class OnlineLoad:
    """See the module's docstring; has what SGLang's ``SchedulerLoadInquirer`` asks for."""

    def __init__(self, scheduler: Any, pools: KvPools, ledger: RequestLedger) -> None:
        self._scheduler = scheduler
        self._pools = pools
        self._ledger = ledger
        self._tokens = self._online_tokens = 0
        """Generated since SGLang last measured its throughput, by all and by online requests."""

        self._stock_per_s = self._online_per_s = 0.0

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

    def get_pool_stats(self) -> Any:
        """Return SGLang's ``PoolStats``, where what offline rows alone hold is evictable.

        O(rows with KV + nodes of the radix cache above them).
        """
        stats = self._scheduler.pool_stats_observer.get_pool_stats()
        online, offline = self._ledger.with_kv()
        if not offline:
            return stats
        changed = _less("full", stats, self._pools.by_class(online, offline).offline)
        if stats.is_hybrid_swa:
            changed |= _less("swa", stats, self._pools.held_in_window(offline))
        if stats.is_hybrid_ssm:
            num_rows = len(offline) + len(online)  # Each has as many states as any other.
            changed |= _less("mamba", stats, stats.mamba_num_used * len(offline) // num_rows)
        return replace(stats, **changed)

    def processed(self, reqs: Sequence[Req], has_token: Sequence[bool]) -> None:
        """Note the rows of a batch, and who got a token."""
        self._tokens += sum(has_token)
        self._online_tokens += sum(
            has and not is_offline(req) for req, has in zip(reqs, has_token, strict=True)
        )

    def put_into(self, stats: Any) -> None:
        """Let SGLang's ``SchedulerStats`` say what an online request finds."""
        counts = type(stats.num_running_reqs)
        has_priorities = self._scheduler.enable_priority_scheduling
        stats.num_running_reqs = counts.from_reqs(self.running_batch().reqs, has_priorities)
        stats.num_queue_reqs = counts.from_reqs(self.waiting_queue(), has_priorities)
        self.get_pool_stats().update_scheduler_stats(stats)
        stats.gen_throughput = self._online_throughput(stats.gen_throughput)

    def _online_throughput(self, per_s: float) -> float:
        """Return the online part of SGLang's throughput, which it measures every few decodes.

        A router that takes it for the speed of an engine would expect less waiting where
        offline requests run.
        """
        if per_s not in (self._stock_per_s, self._online_per_s) and self._tokens:
            self._stock_per_s = per_s
            self._online_per_s = per_s * self._online_tokens / self._tokens
            self._tokens = self._online_tokens = 0
        return self._online_per_s if per_s else 0.0


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
