"""Iterations under a fixed token budget, as engines without a latency model have them."""

from __future__ import annotations

import math

from sglang_coserve.core.batch_builder import BatchBuilder
from sglang_coserve.core.offline_phase import decode_offline, prefill_offline
from sglang_coserve.core.online_phase import decode_online, prefill_online
from sglang_coserve.core.plan_context import PlanContext

__all__ = ["serve_by_priority"]


def serve_by_priority(
    batch: BatchBuilder, context: PlanContext, max_tokens: int, *, may_evict: bool
) -> None:
    """Add all decodes, then online prefills, then offline prefills, up to ``max_tokens``.

    Offline decodes run whatever that does to latency. With ``may_evict`` an online
    request that finds no KV or slot takes them from offline rows.
    """
    max_tokens = min(max_tokens, batch.free_tokens)
    decode_online(batch)
    # The offline decodes' tokens are set aside, because prefills must not stall them; they are
    # added behind the online prefills, because those may still evict them.
    reserved_tokens = len(batch.offline_decodes)
    batch.limit_tokens(max(max_tokens - batch.stats.decode_requests - reserved_tokens, 0))
    prefill_online(batch, context, math.inf, keeps_ttft=False, may_evict=may_evict)
    left_tokens = 0 if batch.has_left_over_online else batch.free_tokens
    batch.offline_budget_s = math.inf
    batch.free_tokens = reserved_tokens
    decode_offline(batch, batch.offline_decodes)
    batch.free_tokens = left_tokens
    prefill_offline(batch, context)
