"""Composes steps under a fixed token budget, as engines without a latency model do."""

from __future__ import annotations

import math

from sglang_coserve.core.planning.offline_phase import decode_offline, prefill_offline
from sglang_coserve.core.planning.online_phase import decode_online, prefill_online
from sglang_coserve.core.planning.plan_context import PlanContext
from sglang_coserve.core.planning.step_builder import StepBuilder

__all__ = ["serve_by_priority"]


def serve_by_priority(
    batch: StepBuilder, context: PlanContext, max_tokens: int, *, may_retract: bool
) -> None:
    """Add all decodes, then online prefills, then offline prefills, up to ``max_tokens``.

    Offline decodes run regardless of latency. With ``may_retract``, offline requests are retracted
    for an online request that lacks KV or a slot.
    """
    max_tokens = min(max_tokens, batch.free_tokens)
    decode_online(batch)
    # Tokens are reserved for the offline decodes, because prefills must not stall them. They are
    # added after the online prefills, because those may still retract them.
    reserved_tokens = len(batch.requests.offline_decodes)
    batch.limit_tokens(max(max_tokens - batch.work.stats.decode_requests - reserved_tokens, 0))
    prefill_online(batch, context, math.inf, may_retract=may_retract)
    left_tokens = 0 if batch.has_left_over_online else batch.free_tokens
    batch.offline_budget_s = math.inf
    batch.free_tokens = reserved_tokens
    decode_offline(batch, batch.requests.offline_decodes)
    batch.free_tokens = left_tokens
    prefill_offline(batch, context)
