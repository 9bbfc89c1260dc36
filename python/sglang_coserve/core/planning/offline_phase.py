"""Phase 2 of planning a step: adds offline work within what online work left."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from typing import Final

from sglang_coserve.core.bottleneck import enough_requests, least_offline_s
from sglang_coserve.core.offline_queue import QueuedRequest
from sglang_coserve.core.offline_queue.request import TOKEN_BYTES, common_prefix_bytes
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.planning.step_memory import Prompt
from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step import Bound
from sglang_coserve.core.step_stats import StepStats

_SPARE_REQUESTS: Final = 1.5
"""Offline requests that hold KV ÷ requests that a steady state needs. Some requests that hold KV
skip a step, so more are needed than decode."""

_FEW_OF: Final = 16
"""The number of offline requests is limited only if online requests may come back to more than this
part of the KV: requests that have but a system prompt in common do not need the limit, which costs
up to a seventh of the offline tokens (simulated, H100, lengths that vary)."""

_PATIENCE_S: Final = 60.0
"""Seconds after which a request that needs most of the KV lets others pass at times."""

_EFFICIENT: Final = 0.95
"""Share of the highest throughput that is enough. A longer step gains little, and stretches the
gaps of everyone in it: slower decodes leave more requests in flight. Simulated on an H100
(``bound.py``), steps up to the slack had a third of the offline tokens."""


def efficient_tokens(batch: StepBuilder) -> int:
    """Return the fewest prefill tokens that give a step 95% of its highest throughput.

    Beside the work that the batch has already. Computed for a single prompt without context, of
    sizes that are halves of each other. O(log tokens) predictions.
    """
    size = fewest = max(batch.free_tokens, 0)
    stats, predict = batch.stats, batch.model.predict
    decodes, best = stats.compute_tokens, 0.0
    # Smaller steps have a lower throughput, or a higher one as long as attention bounds it: where
    # one has too little, those below have less.
    while size >= batch.context.config.min_chunk_tokens:
        rate = (decodes + size) / predict(stats.with_prefill(size, 0))
        if rate < _EFFICIENT * best:
            break
        best, fewest, size = max(best, rate), size, size // 2
    return fewest


def serve_offline(batch: StepBuilder, *, efficiently: bool = False) -> None:
    """Add offline decodes, then offline prefills, within ``batch.offline_budget_s``.

    With ``efficiently``, the batch has all decodes, since one more costs less than the average, and
    only as many prefill tokens as a high throughput needs (ConServe §4.2). Without online
    requests it may take ``least_offline_s`` whatever the budget is, because a shorter step is
    mostly fixed cost.

    Without online requests, the budget leaves no batch empty, because an empty step would stop the
    engine and help nobody. If no decode and no chunk keeps the budget, all decodes are added
    without a budget, and prompts up to the tokens of the smallest chunk. A policy that calls
    ``decode_offline`` and ``prefill_offline`` itself has no such fallback: it sets no budget for
    steps without online requests, as ``OocoPolicy``.
    """
    free_tokens = batch.free_tokens
    if efficiently and not batch.has_online:
        batch.raise_offline(least_offline_s(batch.model), Bound.LEAST_STEP)
    decode_offline(batch, batch.offline_decodes)
    if efficiently:
        batch.limit_tokens(efficient_tokens(batch))
    prefill_offline(batch, efficiently=efficiently)
    if batch.stats.is_empty and not batch.has_online:
        batch.raise_offline(math.inf, Bound.NONE)
        # A chunk has at least one page.
        rules, page_tokens = batch.snapshot.chunk_rules, batch.snapshot.page_tokens
        piece_tokens = math.lcm(rules.align_tokens, page_tokens)
        least_tokens = max(batch.context.config.min_chunk_tokens, piece_tokens)
        batch.free_tokens = min(free_tokens, least_tokens)
        decode_offline(batch, batch.offline_decodes)
        prefill_offline(batch)


def decode_offline(batch: StepBuilder, requests: Iterable[Request]) -> None:
    """Add as many decodes as fit, in the given order; the others pause and keep their KV.

    If there is too little KV for these decodes, or they would take KV from protected prefixes,
    requests are retracted in the policy's victim order. The last request left is never retracted:
    it pauses until there is KV for it. O(requests), with O(log requests) predictions for each
    retraction.
    """
    memory = batch.memory
    requests = memory.without_retracted(requests)
    while True:
        fitting = requests[: num_fitting(batch, requests)]
        needed = memory.kv_to_decode(fitting)
        has_room = memory.has_room(needed, requests=len(fitting))
        if has_room and memory.leaves_prefixes(needed):
            break
        victim = memory.next_victim()
        if victim is None or requests == [victim]:
            if not has_room:
                fitting = []
            break
        memory.retract(victim, needed)
        if victim in requests:
            requests.remove(victim)
    batch.decode(fitting)


def num_fitting(batch: StepBuilder, requests: Sequence[Request]) -> int:
    """Return how many decodes fit the latency and token budgets, counted from the first on.

    O(requests), with O(log requests) predictions.
    """
    limit = len(requests)
    if batch.stats.prefill_tokens:
        limit = min(limit, max(batch.free_tokens, 0))
    tokens = [request.computed_tokens for request in requests[:limit]]
    if limit == 0 or batch.predict_with_decodes(limit, sum(tokens)) <= batch.offline_budget_s:
        return limit
    contexts = list(accumulate(tokens, initial=0))
    return bisect_right(
        range(1, limit),
        batch.offline_budget_s,
        key=lambda count: batch.predict_with_decodes(count, contexts[count]),
    )


def prefill_offline(batch: StepBuilder, *, efficiently: bool = False) -> None:
    """Add offline prefills, unfinished ones first, then from the queue, each as long as fits.

    Stops at the first that is cut or does not fit, so at most one is unfinished and
    the queue's order is kept. A new request also needs free KV as headroom for the running
    requests, or it would soon be retracted for them. A request that shares a prefix with another
    one of the same step is left to the next step, which finds the prefix cached, if this saves
    more than the fixed cost of a step.
    """
    if _continue_prefills(batch) and batch.admits_offline:
        _admit(batch, efficiently=efficiently)


def _continue_prefills(batch: StepBuilder) -> bool:
    memory = batch.memory
    for request in batch.offline_prefills:
        if memory.is_retracted(request):
            continue
        prompt = Prompt.of(request)
        kv_tokens = memory.kv_to_prefill(prompt)
        if kv_tokens > memory.drained_kv_tokens - memory.own_kv(request):
            continue  # Online requests hold the KV that it lacks.
        while not memory.has_room(kv_tokens) and batch.stats.is_empty:
            # No request runs that would free KV by ending, so another unfinished one is retracted.
            victim = memory.next_victim()
            if victim is None or victim is request:
                return False
            memory.retract(victim, kv_tokens)
        if not memory.has_room(kv_tokens):
            return False
        if not _add(batch, prompt) and not _may_be_skipped(batch, prompt):
            return False
    return True


def _admit(batch: StepBuilder, *, efficiently: bool) -> None:
    config, queue = batch.context.config, batch.context.queue
    # Return early: looking up the prefix cache costs as much as the rest of the function.
    if batch.memory.free_slots <= 0 or batch.free_tokens <= 0:
        return
    if batch.predicted_s >= batch.offline_budget_s:
        return
    seen = batch.snapshot
    num_requests = len(seen.admitted) + len(seen.elsewhere) + len(batch.chunks)
    held = sum(not request.info.is_online for request in (*seen.admitted, *seen.elsewhere))
    picks = config.max_picks
    if efficiently and batch.context.protection.tokens * _FEW_OF > batch.memory.all_kv_tokens:
        # Requests of a suspended step hold KV, but do no work until the step goes on.
        picks = min(picks, _most_requests(batch) - held)
    if config.max_offline_requests is not None:
        if seen.suspended is not None:
            held += seen.suspended.batch.prefill_requests + seen.suspended.batch.decode_requests
        picks = min(picks, config.max_offline_requests - held)
    added_tokens = 0
    prompts = [
        queue.running(chunk.rid).token_ids for chunk in batch.chunks if queue.is_running(chunk.rid)
    ]
    for request, prompt in islice(batch.candidates(batch.offline_reach_tokens), max(picks, 0)):
        if prompts and seen.keeps_prefixes:
            more_tokens = _shared_tokens(request, prompt, prompts, seen.page_tokens)
            if more_tokens and _is_worth_a_step(batch, prompt, more_tokens):
                continue
        kv_tokens = batch.memory.kv_to_prefill(prompt)
        headroom_tokens = batch.memory.headroom_tokens(config.headroom_tokens, num_requests)
        has_room = batch.memory.has_room(kv_tokens + headroom_tokens, slots=1)
        # A request that needs more than its class may have would wait forever.
        if has_room and (held > 0 or added_tokens > 0):
            has_room = batch.memory.leaves_prefixes(
                kv_tokens, headroom_tokens=headroom_tokens, added_tokens=added_tokens
            )
        if not has_room:
            if _is_waited_for(batch, kv_tokens, request.arrival_s):
                return
            continue
        if not _add(batch, prompt):
            if _may_be_skipped(batch, prompt):
                continue
            return
        added_tokens += kv_tokens
        num_requests += 1
        prompts.append(request.token_ids)


def _is_waited_for(batch: StepBuilder, kv_tokens: int, since_s: float) -> bool:
    """Return whether nobody is admitted before a request that lacks room for its KV.

    A small request is waited for, as offline work soon leaves it the room. A request that needs
    more than half of what offline work may have is waited for half of the time, in spans that grow
    with its age (1 to 1.5 minutes, 2 to 3, 4 to 6, ...). So its turn comes, and costs the others
    half of their throughput at most.
    """
    most_tokens = batch.offline_reach_tokens
    if kv_tokens > most_tokens:
        return False
    age = max((batch.snapshot.now_s - since_s) / _PATIENCE_S, 1.0)
    return 2 * kv_tokens <= most_tokens or age < 1.5 * 2.0 ** math.floor(math.log2(age))


def _most_requests(batch: StepBuilder) -> int:
    """Return the most offline requests that are worth their KV.

    Others would take it from prefixes that conversations come back to. Simulated, H100, 40 chats of
    8,000 tokens beside prompts of 4,096 and outputs of 128 tokens: 100% of the tokens that are
    cached alone are found, 69% without this limit, and offline work has 4% fewer tokens then.
    """
    context = batch.context
    next_request = context.queue.peek(batch.snapshot.now_s)
    if next_request is None:
        return 0
    prompt_tokens, output_tokens = context.offline_shape.mean_tokens(next_request)
    stats = batch.online_decode_stats
    most = len(batch.snapshot.admitted) + context.config.max_picks
    enough = enough_requests(
        batch.model, stats, prompt_tokens, output_tokens, batch.offline_budget_s, most
    )
    return math.ceil(_SPARE_REQUESTS * enough) + 1


def _shared_tokens(
    request: QueuedRequest, prompt: Prompt, prompts: Sequence[bytes], page_tokens: int
) -> int:
    """Return how many more tokens of a prompt will be cached once one of ``prompts`` is computed.

    In whole pages. O(prompts).
    """
    own = request.token_ids
    more_bytes = (prompt.context_tokens + page_tokens) * TOKEN_BYTES
    for other in reversed(prompts):
        if len(own) > more_bytes and other[:more_bytes] == own[:more_bytes]:
            # The last token is always computed, because its logits are needed.
            end_bytes = min(len(other), len(own) - TOKEN_BYTES)
            shared_bytes = common_prefix_bytes(own, other, more_bytes, end_bytes)
            shared_tokens = shared_bytes // TOKEN_BYTES // page_tokens * page_tokens
            return max(shared_tokens - prompt.context_tokens, 0)
    return 0


def _is_worth_a_step(batch: StepBuilder, prompt: Prompt, shared_tokens: int) -> bool:
    """Return whether computing so many tokens again costs more than the fixed cost of a step."""
    _, context_tokens, rest_tokens, _ = prompt
    least_s = batch.model.predict(StepStats().with_prefill(1, 0))
    whole_s = batch.predict_with_prefill(rest_tokens, context_tokens)
    rest_s = batch.predict_with_prefill(rest_tokens - shared_tokens, context_tokens + shared_tokens)
    return whole_s - rest_s > least_s


def _may_be_skipped(batch: StepBuilder, prompt: Prompt) -> bool:
    """Return whether later prompts go on while this one has no piece in the step.

    Where pieces are coarse, no step beside online work may have time for one. Without online work
    the next empty step has.
    """
    is_left_out = prompt.rid not in batch.memory.chunks
    return is_left_out and batch.has_online and batch.snapshot.chunk_rules.are_coarse


def _add(batch: StepBuilder, prompt: Prompt) -> bool:
    """Add the longest chunk that fits; return whether it completes the prompt."""
    tokens = batch.longest_chunk(prompt, batch.offline_budget_s)
    least_tokens = min(batch.context.config.min_chunk_tokens, batch.snapshot.max_batch_tokens)
    if tokens < min(prompt.rest_tokens, least_tokens):
        return False
    batch.prefill(prompt, tokens)
    return tokens == prompt.rest_tokens
