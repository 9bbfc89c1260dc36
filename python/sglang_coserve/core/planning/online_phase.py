"""Phase 1 of planning a step: adds online work first (HyGen §4.1, ConServe Algorithm 1)."""

from __future__ import annotations

import math
from itertools import chain
from typing import Final

from sglang_coserve.core.planning.online_prompts import OnlinePrompts
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.planning.step_memory import Prompt
from sglang_coserve.core.scheduler_config import Overload
from sglang_coserve.core.step import Bound, Lane, PromptStop

_CROWDED: Final = 0.5
"""Share of the KV above which online decodes leave prompts too little. Simulated, +10%, 8B on an
H100, 80 and 90% load of Azure's conversations and of BurstGPT, two seeds: P99 TTFT is 1.08-1.24 and
once 3.2 x alone, 1.13-1.38 and twice 4.7 without this; offline work has 4-30% fewer tokens. With
0.4 1.8 instead of 3.2 x, and another 5-14% fewer."""

_MORE_THAN_ALONE: Final = 1.1
"""Times as many decodes as in the baseline, which is a little behind. With 1.5, 3.8 instead of
3.1 x."""


_LEAST_PIECE: Final = 1.25
"""Prompt tokens for which a step with online decodes always has time, in smallest pieces. A little
more than one, so that offline decodes or a context leave a piece. Measured on a model of 4 layers
on a CPU, with 3 online streams: P50 TTFT is 31 ms and offline work has 2,760 tokens/s; with 2 39 ms
and 2,020 to 3,020 tokens/s; with none 31 ms and 1,480 tokens/s, and at times offline work stops."""


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
    prompts = OnlinePrompts(batch)
    prompt_slack_s = slack_s + prompts.stall_s()
    if prompts.go_first(prompt_slack_s * batch.context.timely):
        _prefill_before_decodes(batch)
    else:
        decode_online(batch)
        left_s = math.inf if batch.context.is_plain else prompt_slack_s
        prefill_online(batch, min(budget_s, left_s) * batch.context.timely)
    online_s = batch.online_part_s = batch.predicted_s
    if batch.lane is Lane.OFFLINE:
        return  # No online request waits for the end of such a step.
    added_s = max(slack_s * batch.context.timely - online_s, 0.0)
    arrival_s, piece_s = batch.context.allowance.arrival_s, _least_added_s(batch)
    why = Bound.ARRIVAL if arrival_s >= piece_s else Bound.LEAST_PIECE
    arrival_s = max(arrival_s, piece_s)
    if batch.has_online_prompts:
        stats = batch.stats._replace(decode_requests=0, decode_context_tokens=0)
        batch.prompts_s = 0.0 if stats.is_empty else batch.model.predict(stats)
        arrival_s = max(batch.context.prompt_s - (online_s - batch.prompts_s), 0.0)
        why = Bound.PROMPTS_WAIT
        if batch.offline_budget_s > 0:
            # Where memory was short, thousands may wait: those behind wait for later steps, too.
            first = batch.first_prompts(batch.snapshot.max_batch_tokens)
            due_s = min([batch.due_s(one) for one in first])
            batch.limit_offline(due_s * batch.context.timely, Bound.PROMPT)
    batch.limit_offline(online_s + added_s, Bound.GAP)
    batch.limit_offline(online_s + arrival_s, why)
    if _is_crowded(batch):
        batch.limit_offline(0.0, Bound.KV)


def _least_added_s(batch: StepBuilder) -> float:
    """Return the seconds that offline work may always add to a step of online decodes.

    The time is enough for the shortest piece of a prompt. Where first tokens alone take a few
    milliseconds, a tenth of this time is shorter than any piece, and offline work would stop while
    streams run. 0 if the piece takes longer than the decodes: it then waits for a step without
    online work.
    """
    decodes = batch.online_decode_stats
    if not decodes.decode_requests:
        return 0.0
    least_tokens = math.ceil(_LEAST_PIECE * batch.context.config.min_chunk_tokens)
    piece = decodes.with_prefill(least_tokens, 0)
    added_s = batch.model.predict(piece) - batch.decodes_s
    return added_s if added_s <= batch.decodes_s else 0.0


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
    ``serve_online``), and ``prompt_stop``.
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
        if tokens < prompt.rest_tokens:
            batch.prompt_stop = _stop_of(batch, prompt, tokens)
        if tokens == 0:
            batch.limit_offline(0.0, Bound.PROMPT_LEFT)
            return
        find_room = batch.memory.reclaim if may_retract else batch.memory.has_room
        if not find_room(batch.memory.kv_to_prefill(prompt), prompt.is_new):
            batch.admits_offline = False
            batch.prompt_stop = PromptStop.MEMORY
            break
        batch.prefill(prompt, tokens)
        if tokens < prompt.rest_tokens:
            batch.limit_offline(0.0, Bound.PROMPT_LEFT)
            return
        if request.info.ttft_target_s is not None:
            batch.limit_offline(batch.due_s(request) * batch.context.timely, Bound.PROMPT)
    batch.limit_offline(budget_s, Bound.GAP)


def _stop_of(batch: StepBuilder, prompt: Prompt, tokens: int) -> PromptStop:
    """Return why only so many tokens of a prompt are in the step."""
    most_tokens = batch.most_tokens(prompt, batch.free_tokens, batch.stats)
    is_full = tokens >= batch.memory.align_chunk(prompt, max(most_tokens, 0))
    return PromptStop.FULL if is_full else PromptStop.PACE


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
    return seconds + more_steps * batch.decodes_s
