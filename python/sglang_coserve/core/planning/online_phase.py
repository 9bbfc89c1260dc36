"""Phase 1 of planning a step: adds online work first (HyGen §4.1, ConServe Algorithm 1)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Final

from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.planning.step_memory import Prompt
from sglang_coserve.core.scheduler_config import Overload
from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step import Bound, Lane
from sglang_coserve.core.step_stats import StepStats

_CROWDED: Final = 0.5
"""Share of the KV above which online decodes leave prompts too little. Simulated, +10%, 8B on an
H100, 80 and 90% load of Azure's conversations and of BurstGPT, two seeds: P99 TTFT is 1.08-1.24 and
once 3.2 x alone, 1.13-1.38 and twice 4.7 without this; offline work has 4-30% fewer tokens. With
0.4 1.8 instead of 3.2 x, and another 5-14% fewer."""

_MORE_THAN_ALONE: Final = 1.1
"""Times as many decodes as in the baseline, which is a little behind. With 1.5, 3.8 instead of
3.1 x."""

_LATER: Final = 0.15
"""Share of their time by which online prompts may end later to keep the pace of streams. Simulated
(8B on an H100, the demo's load; Azure's conversations at 50%, two seeds), the P99 gap is 63 and 53
ms with 0.1, 20 and 43 ms with 0.15, 20 and 33 ms with 0.25. P99 TTFT at 50% is 1.13, 1.09 and
1.14 x alone."""


def serve_online(batch: StepBuilder, budget_s: float) -> None:
    """Add online work: prompts alone as plain SGLang does, or as much of them as decodes can wait.

    Sets ``batch.offline_budget_s``, the latency budget of the whole batch with offline work; 0 if
    an online prompt was left over, since offline work would delay it. What offline work adds is
    bounded by the slack of the decodes and by what a request that arrives during the step may
    wait (``Allowance``). It adds nothing where it has made online decodes so many that they crowd
    the KV.
    """
    batch.limit_offline(budget_s * batch.context.timely, Bound.BUDGET)
    slack_s = batch.slack_s  # Decodes that are retracted here count, too.
    prompt_slack_s = slack_s + _stall_s(batch)
    if _is_prompts_first(batch, prompt_slack_s * batch.context.timely):
        _prefill_before_decodes(batch)
    else:
        decode_online(batch)
        left_s = math.inf if batch.context.is_plain else prompt_slack_s
        prefill_online(batch, min(budget_s, left_s) * batch.context.timely)
    online_s = batch.online_part_s = batch.predicted_s
    if batch.lane is Lane.OFFLINE:
        return  # No online request waits for the end of such a step.
    added_s = max(slack_s * batch.context.timely - online_s, 0.0)
    arrival_s = batch.context.allowance.arrival_s
    if batch.has_online_prompts:
        stats = batch.stats._replace(decode_requests=0, decode_context_tokens=0)
        batch.prompts_s = 0.0 if stats.is_empty else batch.model.predict(stats)
        arrival_s = max(batch.context.prompt_s - (online_s - batch.prompts_s), 0.0)
        if batch.offline_budget_s > 0:
            # Where memory was short, thousands may wait: those behind wait for later steps, too.
            first = batch.first_prompts(batch.snapshot.max_batch_tokens)
            due_s = min([batch.due_s(one) for one in first])
            batch.limit_offline(due_s * batch.context.timely, Bound.PROMPT)
    batch.limit_offline(online_s + added_s, Bound.GAP)
    batch.limit_offline(online_s + arrival_s, Bound.ARRIVAL)
    if _is_crowded(batch):
        batch.limit_offline(0.0, Bound.KV)


def _is_crowded(batch: StepBuilder) -> bool:
    """Return whether offline work would keep KV from prompts, by slowing decodes.

    Slower decodes stay longer, so there are more of them, and the next prompts wait for KV. O(1),
    or O(requests) if there are more decodes than alone.
    """
    elsewhere = sum(request.info.is_online for request in batch.snapshot.elsewhere)
    num_decodes = len(batch.online_decodes) + elsewhere
    if num_decodes <= _MORE_THAN_ALONE * batch.context.decodes_alone:
        return False
    held_tokens = batch.online_decode_stats.decode_context_tokens
    return held_tokens > _CROWDED * batch.memory.all_kv_tokens


def _prefill_before_decodes(batch: StepBuilder) -> None:
    """Add online prefills without decodes; only the decodes if no prompt finds memory."""
    decodes_kv = batch.memory.kv_to_decode(batch.online_decodes)
    batch.memory.free_kv_tokens -= decodes_kv  # Reserved for the decodes of the next step.
    prefill_online(batch, math.inf)
    batch.memory.free_kv_tokens += decodes_kv
    if batch.stats.is_empty:
        decode_online(batch)
    else:
        batch.skips_decodes = True
        batch.limit_offline(0.0, Bound.PROMPTS_FIRST)


def _stall_s(batch: StepBuilder) -> float:
    """Return the seconds by which online prompts may exceed the pace of streams.

    Prompts are cut to keep the pace. Shorter pieces delay first tokens, since more steps have the
    decodes, too. The pieces are as long as first tokens need (``_most_token_s``), and no step
    exceeds the P99 gap alone. O(log tokens) predictions for a step with prompts.
    """
    if not batch.stall_s or not batch.has_online_prompts or batch.context.is_plain:
        return 0.0
    first = batch.first_prompts(batch.free_tokens)
    token_s, context_tokens = _most_token_s(batch, first), first[0].computed_tokens
    decodes, predict = batch.online_decode_stats, batch.model.predict

    def is_enough(tokens: int) -> bool:
        return predict(decodes.with_prefill(tokens, context_tokens)) <= tokens * token_s

    most_tokens = min(batch.free_tokens, sum([one.tokens_to_compute for one in first]))
    if not is_enough(most_tokens):
        return batch.stall_s
    tokens = 1 + bisect_left(range(1, most_tokens), True, key=is_enough)
    step_s = predict(decodes.with_prefill(tokens, context_tokens)) / batch.context.timely
    return min(max(step_s - batch.slack_s, 0.0), batch.stall_s)


def _most_token_s(batch: StepBuilder, first: Sequence[Request]) -> float:
    """Return the longest time in seconds that a token of the first prompts may take beside decodes.

    All online prompts together may end later by what an arrival may wait, or by ``_LATER`` of
    their time. No first token may miss its target for the decodes in the steps.
    """
    alone = _alone(batch, first)
    alone_s = batch.model.predict(alone) / alone.prefill_tokens
    tokens = sum([one.tokens_to_compute for one in first])
    num_prompts = len(batch.online_prefills) + len(batch.snapshot.waiting)
    all_tokens = tokens * num_prompts / len(first)
    waited_s = batch.snapshot.begins_s - first[0].info.arrival_s
    later_s = max(batch.context.allowance.arrival_s, _LATER * (waited_s + all_tokens * alone_s))
    ends = accumulate(one.tokens_to_compute for one in first)
    due_s = [batch.due_s(one) * batch.context.timely for one in first]
    in_time_s = min([due / end for due, end in zip(due_s, ends, strict=True)])
    return max(alone_s, min(alone_s + later_s / all_tokens, in_time_s))


def _delay_by_cutting_s(batch: StepBuilder, step_s: float) -> float:
    """Return by how much online prompts end later beside decodes, in steps of ``step_s``, than in
    steps of their own; infinite if no prompt token fits such a step.

    Prompts beyond the first step are taken to have the mean length of its prompts.
    """
    first = batch.first_prompts(batch.free_tokens)
    token_s = _mixed_token_s(batch, first, step_s)
    if math.isinf(token_s):
        return math.inf
    alone = _alone(batch, first)
    num_prompts = len(batch.online_prefills) + len(batch.snapshot.waiting)
    all_tokens = sum([one.tokens_to_compute for one in first]) * num_prompts / len(first)
    return all_tokens * (token_s - batch.model.predict(alone) / alone.prefill_tokens)


def _alone(batch: StepBuilder, first: Sequence[Request]) -> StepStats:
    """Return the sums over a step of these online prompts alone, as far as they fit. O(prompts)."""
    stats, free_tokens = StepStats(), batch.free_tokens
    for request in first:
        tokens = min(request.tokens_to_compute, free_tokens - stats.prefill_tokens)
        if tokens > 0:
            stats = stats.with_prefill(tokens, request.length_tokens - request.tokens_to_compute)
    return stats


def _mixed_token_s(batch: StepBuilder, first: Sequence[Request], step_s: float) -> float:
    """Return the seconds that a prompt token takes in a step of ``step_s`` with the decodes in it;
    infinite if not even one fits."""
    decodes, context_tokens = batch.online_decode_stats, first[0].computed_tokens
    limit_tokens = min(batch.free_tokens, sum([one.tokens_to_compute for one in first]))
    tokens = batch.model.max_prefill_tokens(decodes, context_tokens, limit_tokens, step_s)
    if not tokens:
        return math.inf
    return batch.model.predict(decodes.with_prefill(tokens, context_tokens)) / tokens


def _is_prompts_first(batch: StepBuilder, step_s: float) -> bool:
    """Return whether online prompts run without decodes, as in plain SGLang.

    SGLang stalls the decodes for every prompt. Where nothing asks for shorter gaps than plain
    SGLang has, and no offline work is there, its order is kept. Otherwise decodes wait as long as
    they can, and then join the prompts: that delays first tokens less than a step of their own, or
    than joining every step. Where no step has tokens for all decodes and a piece of a prompt,
    prompts go first, too. The step is as long as the decodes can wait, so that prompts spread
    over several steps, with the decodes in each. Prompts go first if that delays them by more than
    offline work may add (``prompt_s``), and makes a first token late. O(requests), and of those
    that wait only as many as fit a step: those behind are taken to be as long.
    """
    decodes, memory = batch.online_decodes, batch.memory
    if not decodes or not batch.has_online_prompts:
        return False
    if not memory.has_room(memory.kv_to_decode(decodes), requests=len(decodes)):
        return False
    if not batch.shortest_chunk(Prompt.of(batch.first_prompts(1)[0]), beside=len(decodes)):
        return True
    if batch.context.config.overload is Overload.SHED:
        return False
    if batch.context.is_plain:
        return not batch.context.mixes_decodes
    if math.isinf(step_s):
        return False
    first = batch.first_prompts(batch.free_tokens)
    both_s = batch.model.predict(_alone(batch, first)) + batch.model.predict(
        batch.online_decode_stats
    )
    if both_s <= step_s:
        return True
    if _delay_by_cutting_s(batch, step_s) <= batch.context.prompt_s:
        return False
    token_s = _mixed_token_s(batch, first, step_s)
    ends = accumulate(token_s * one.tokens_to_compute for one in first)
    return any(
        end_s > batch.due_s(one) * batch.context.timely
        for one, end_s in zip(first, ends, strict=True)
    )


def decode_online(batch: StepBuilder) -> None:
    """Add every online decode.

    If KV is short, offline requests are retracted, then unfinished online prefills, then
    the last of the decodes themselves.
    """
    requests, memory = batch.online_decodes, batch.memory
    while not memory.reclaim(needed := memory.kv_to_decode(requests), requests=len(requests)):
        memory.retract((batch.online_prefills or requests).pop(), needed)
    batch.decode(requests)


def prefill_online(batch: StepBuilder, budget_s: float, *, may_retract: bool = True) -> None:
    """Add online prefills in order: the unfinished ones, then the waiting ones.

    Stops at the first that does not fit, so that no later request overtakes it. Where pieces are
    coarse (``ChunkRules``), the shortest piece of the first prompt runs even over the budget: it
    might fit no step beside decodes. Under
    ``Overload.SHED`` requests that would be late are refused. Sets ``offline_budget_s`` (see
    ``serve_online``).
    """
    sheds = batch.context.config.overload is Overload.SHED
    for request in chain(batch.online_prefills, batch.snapshot.waiting):
        prompt = Prompt.of(request)
        may_shed = sheds and prompt.is_new and request.generated_tokens == 0
        left_s = batch.left_s(request) * batch.context.timely
        if may_shed and _first_token_s(batch, prompt, budget_s) > left_s:
            batch.shed.append(request.info.rid)
            continue
        tokens = batch.longest_chunk(prompt, budget_s)
        if tokens == 0 and batch.stats.is_empty:
            # A budget that even the smallest batch exceeds must not stop the engine.
            tokens = batch.longest_chunk(prompt, math.inf)
        if tokens == 0 and batch.snapshot.chunk_rules.are_coarse and not batch.chunks:
            tokens = batch.shortest_chunk(prompt)
        if tokens == 0:
            batch.limit_offline(0.0, Bound.PROMPT_LEFT)
            return
        find_room = batch.memory.reclaim if may_retract else batch.memory.has_room
        if not find_room(batch.memory.kv_to_prefill(prompt), prompt.is_new):
            batch.admits_offline = False
            break
        batch.prefill(prompt, tokens)
        if tokens < prompt.rest_tokens:
            batch.limit_offline(0.0, Bound.PROMPT_LEFT)
            return
        if request.info.ttft_target_s is not None:
            batch.limit_offline(batch.due_s(request) * batch.context.timely, Bound.PROMPT)
    batch.limit_offline(budget_s, Bound.GAP)


def _first_token_s(batch: StepBuilder, prompt: Prompt, budget_s: float) -> float:
    """Return how long a prompt that begins now takes, in steps of ``budget_s`` beside decodes."""
    context_tokens, rest_tokens = prompt.context_tokens, prompt.rest_tokens
    seconds = batch.predict_with_prefill(rest_tokens, context_tokens)
    left_tokens = rest_tokens - batch.longest_chunk(prompt, budget_s)
    if not left_tokens:
        return seconds
    decodes = batch.online_decode_stats
    limit = min(left_tokens, batch.snapshot.max_batch_tokens)
    step_s = min(budget_s, seconds)
    step_tokens = batch.model.max_prefill_tokens(decodes, context_tokens, limit, step_s)
    # Where decodes leave no room at all, when they will is unknown: it waits for one step at least.
    more_steps = math.ceil(left_tokens / step_tokens) if step_tokens else 1
    return seconds + more_steps * batch.model.predict(decodes)
