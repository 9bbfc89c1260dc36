"""Phase 1 of an iteration: online work, before any offline work (HyGen §4.1, ConServe Alg. 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Final

from sglang_coserve.core.arrival_rate import best_iteration_s
from sglang_coserve.core.batch_builder import BatchBuilder
from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.bottleneck import fixed_s
from sglang_coserve.core.plan_context import PlanContext
from sglang_coserve.core.scheduler_config import Overload
from sglang_coserve.core.snapshot import Row
from sglang_coserve.core.step import Lane

__all__ = ["decode_online", "prefill_online", "serve_online", "slack_s"]

_SPARED_CUT: Final = 0.1
"""Part of its budget by which a batch may exceed it for the end of a prompt: a cut costs the
prompt another iteration, and all that decode in that one."""


def serve_online(batch: BatchBuilder, context: PlanContext, budget_s: float) -> None:
    """Add every online decode, then online prefills in order within the budget.

    The batch is also kept within the TPOT slack of the decodes and the TTFT slack
    of each prompt it completes, so that a later prompt does not delay an
    earlier one beyond its target. A prompt's own target does not shorten its
    chunk: that could only delay it.

    Sets ``batch.offline_budget_s``: what all that leaves to offline work; 0 if an
    online prompt was left over or is late, since offline work would delay it. A
    request that arrives meanwhile counts, too: ``SchedulerConfig.arrival_wait_s``.
    """
    margin = context.config.margin
    left_s = min(budget_s, batch.tpot_slack_s)
    prompts_s = _time_before_decodes_s(batch, context, budget_s)
    if prompts_s is None:
        decode_online(batch)
        prefill_online(batch, context, left_s * (1 - margin), spared_cut=_SPARED_CUT)
    else:
        _prefill_before_decodes(batch, context, prompts_s)
    batch.online_part_s = batch.predicted_s
    if batch.lane is Lane.OFFLINE:
        return  # Nobody waits for its end.
    share = _wait_share(batch)
    batch.arrival_wait_s = context.arrival_wait_s(share)
    # What iterations take longer, the wait has learned already.
    arrival_s = _arrival_budget_s(batch, context, share) * (1 - margin)
    offline_s = left_s * (1 - context.margin)
    batch.offline_budget_s = min(batch.offline_budget_s, offline_s, arrival_s)


def _prefill_before_decodes(batch: BatchBuilder, context: PlanContext, budget_s: float) -> None:
    """Add online prefills alone; the decodes, if the prompts find no memory."""
    decodes_kv = batch.kv_to_decode(batch.online_decodes)
    batch.free_kv_tokens -= decodes_kv  # For the next iteration.
    prefill_online(batch, context, budget_s, spared_cut=_SPARED_CUT)
    batch.free_kv_tokens += decodes_kv
    if batch.stats.is_empty:
        decode_online(batch)
    else:
        batch.skips_decodes = True
        batch.leave_over_online(by_deadline=True)


def _time_before_decodes_s(
    batch: BatchBuilder, context: PlanContext, budget_s: float
) -> float | None:
    """Return how long the prompts may have an iteration to themselves; None if they do not.

    SGLang lets the decodes stall for every prompt. Here they run beside the prompts,
    which costs less in all; but where that makes a first token late, or would make one
    late that arrives meanwhile and then takes as long again, the prompts go first as
    long as the next token of every decode can wait. For one that is late they do so even
    longer: a target for the 99th percentile allows some late gaps between tokens, and one
    long gap of a request costs it no more of them than one that is just too long. No gap
    is longer than both targets together. O(waiting + rows).
    """
    if not batch.online_decodes or math.isinf(batch.tpot_slack_s):
        return None
    prompts = [*batch.online_prefills, *batch.snapshot.waiting]
    if not prompts or not batch.has_room(batch.kv_to_decode(batch.online_decodes)):
        return None
    contexts = sum([row.computed_tokens for row in batch.online_decodes])
    decodes_s = batch.predict_with_decodes(len(batch.online_decodes), contexts)
    alone_s = batch.predict_with_whole(prompts)
    least_slack_s = min(slack_s(batch, row) for row in prompts)
    share = 1 - context.config.margin
    beside_s = (alone_s + decodes_s) / share
    makes_late = beside_s > least_slack_s
    if not makes_late and 2 * beside_s <= (batch.targets.ttft_s or math.inf):
        return None
    first_s = batch.predict_with_whole(prompts[:1])
    limit_s = min(budget_s, batch.tpot_slack_s) * share - decodes_s
    if alone_s > limit_s:
        if not makes_late:
            return None
        if batch.late_decodes(alone_s + decodes_s) < context.late_gaps:
            longest_s = batch.tpot_slack_s + (batch.targets.ttft_s or 0.0)
            limit_s = min(budget_s, longest_s) * share - decodes_s
    return limit_s if first_s <= limit_s else None


def _wait_share(batch: BatchBuilder) -> float:
    """Return the part of the step that a request which arrives in it waits at most."""
    if batch.has_online and batch.stats.prefill_requests:
        # Whoever is prefilled in it waits for its end, though offline work be given up.
        return 1.0
    seen = batch.snapshot
    return seen.mixed_arrival_wait_share if batch.has_online else seen.arrival_wait_share


def _arrival_budget_s(batch: BatchBuilder, context: PlanContext, share: float) -> float:
    """Return how long an iteration offline work may fill because of requests yet to arrive.

    One that they can abort may be longer than their wait, but no longer than pays
    with so many of them.
    """
    wait_s = batch.arrival_wait_s
    if share == 1.0:
        return wait_s
    # What online decodes add to that is not lost: fewer iterations decode more of them in each.
    best_s = best_iteration_s(fixed_s(batch.model), context.arrivals_per_s)
    return max(wait_s, min(wait_s / share, best_s))


def decode_online(batch: BatchBuilder) -> None:
    """Add every online decode.

    If KV is short, offline rows lose theirs, then unfinished online prefills, then
    the last of the decodes themselves.
    """
    rows = batch.online_decodes
    while not batch.reclaim(needed := batch.kv_to_decode(rows)):
        batch.evict((batch.online_prefills or rows).pop(), needed)
    batch.decode(rows)


def prefill_online(
    batch: BatchBuilder,
    context: PlanContext,
    budget_s: float,
    *,
    keeps_ttft: bool = True,
    may_evict: bool = True,
    spared_cut: float = 0.0,
) -> None:
    """Add online prefills in order: the unfinished ones, then the waiting ones.

    Stops at the first that does not fit: no later request overtakes it. One that
    fits into ``spared_cut`` of the budget more is not cut. Sets
    ``offline_budget_s`` as ``serve_online`` says.
    """
    config = context.config
    sheds = config.overload is Overload.SHED
    floor_tokens = 0 if sheds else config.min_online_chunk_tokens
    slack_share = 1 - config.margin
    ttft_s = math.inf
    # Where all that waits fits at once, one prediction stands for those of every row.
    all_s = batch.predict_with_whole(chain(batch.online_prefills, batch.snapshot.waiting))
    for row, is_new in _prefills(batch, context):
        rest_tokens = row.tokens_to_compute
        cached_tokens = row.computed_tokens or row.cached_tokens
        row_slack_s = slack_s(batch, row) if keeps_ttft else math.inf
        if all_s <= budget_s and all_s <= row_slack_s:
            whole_s = all_s
        else:
            whole_s = batch.predict_with_prefill(rest_tokens, cached_tokens)
        if sheds and whole_s > row_slack_s and is_new and row.generated_tokens == 0:
            batch.shed(row)
            continue
        deadline_s = ttft_s
        if whole_s > ttft_s and _is_late_next(batch, rest_tokens, cached_tokens, row_slack_s):
            deadline_s = math.inf
            batch.is_deadline_bound = True
        whole_limit_s = min(budget_s * (1 + spared_cut), deadline_s)
        if whole_s <= whole_limit_s and rest_tokens <= batch.free_tokens:
            tokens = rest_tokens
        else:
            limit_s = min(budget_s, deadline_s)
            tokens = _cut(batch, cached_tokens, rest_tokens, limit_s, floor_tokens)
        if tokens == 0:
            batch.leave_over_online(by_deadline=batch.free_tokens > 0)
            return
        kv_tokens = batch.kv_to_prefill(cached_tokens, rest_tokens, is_new=is_new)
        has_room = batch.has_room(kv_tokens, is_new)
        if not has_room and not (may_evict and batch.reclaim(kv_tokens, is_new)):
            batch.admits_offline = False
            break
        batch.prefill(row.info.rid, tokens, cached_tokens, kv_tokens, is_new=is_new)
        floor_tokens = 0
        if tokens < rest_tokens:
            batch.leave_over_online(by_deadline=batch.free_tokens > 0)
            return
        if whole_s > row_slack_s:
            batch.leave_over_online(by_deadline=True)
        else:
            ttft_s = min(ttft_s, row_slack_s * slack_share)
    batch.offline_budget_s = min(batch.offline_budget_s, budget_s, ttft_s)


def _is_late_next(batch: BatchBuilder, tokens: int, context_tokens: int, slack_s: float) -> bool:
    """Tell whether a prompt would be late in the iteration after this one, as it is now."""
    alone_s = batch.model.predict(BatchStats.of([(tokens, context_tokens)]))
    return batch.predicted_s + alone_s > slack_s


def slack_s(batch: BatchBuilder, row: Row) -> float:
    """Return the time until a row's next token misses its target; negative once it has."""
    info, targets = row.info, batch.targets
    if row.generated_tokens and row.last_token_s is not None:
        start_s, target_s = row.last_token_s, info.tpot_target_s or targets.tpot_s
    else:
        start_s, target_s = info.arrival_s, info.ttft_target_s or targets.ttft_s
    return math.inf if target_s is None else start_s + target_s - batch.snapshot.now_s


def _prefills(batch: BatchBuilder, context: PlanContext) -> Iterator[tuple[Row, bool]]:
    for row in batch.online_prefills:
        yield row, False
    for row in context.waiting:
        yield row, True


def _cut(
    batch: BatchBuilder, cached_tokens: int, rest_tokens: int, budget_s: float, floor_tokens: int
) -> int:
    """Return the longest chunk within the budget, but at least the floor."""
    tokens = batch.longest_chunk(cached_tokens, rest_tokens, budget_s)
    if tokens == 0 and batch.stats.is_empty:
        # An empty batch makes nobody late: a budget it cannot keep must not stop it.
        tokens = batch.longest_chunk(cached_tokens, rest_tokens, math.inf)
    floor_tokens = min(floor_tokens, rest_tokens, batch.free_tokens)
    return max(tokens, batch.align_chunk(cached_tokens, rest_tokens, floor_tokens))
