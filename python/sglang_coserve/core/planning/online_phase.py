"""Phase 1 of planning a step: adds online work first (HyGen §4.1, ConServe Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Final

from sglang_coserve.core.planning.plan_context import PlanContext
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.scheduler_config import OnlineOrder, Overload
from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step import Lane
from sglang_coserve.core.step_stats import StepStats

__all__ = ["decode_online", "prefill_online", "serve_online", "slack_s"]

_SPARED_CUT: Final = 0.1
"""Share by which a batch may exceed its budget to complete a prompt: a cut would cost the prompt,
and all requests that decode meanwhile, another step."""


def serve_online(batch: StepBuilder, context: PlanContext, budget_s: float) -> None:
    """Add every online decode, then online prefills in order within the budget.

    The batch is also kept within the TPOT slack of the decodes and the TTFT slack
    of each prompt that it completes, so that a later prompt does not delay an
    earlier one beyond its target. A prompt's own target does not shorten its
    chunk, as that could only delay it.

    Sets ``batch.offline_budget_s`` to the latency budget left for the whole batch with offline
    work; 0 if an online prompt was left over or is late, since offline work would delay it.
    Requests that arrive during the step bound it too (``SchedulerConfig.arrival_wait_s``).
    """
    margin = context.config.margin
    prompts_s = _time_before_decodes_s(batch, context, budget_s)
    if prompts_s is None:
        decode_online(batch)
        pace = context.shed_pace if context.config.overload is Overload.SHED else 1.0
        left_s = min(budget_s, batch.deadlines.slack_s * pace) * (1 - margin)
        prefill_online(batch, context, left_s, spared_cut=_SPARED_CUT)
    else:
        _prefill_before_decodes(batch, context, prompts_s)
    batch.online_part_s = batch.work.predicted_s
    if batch.lane is Lane.OFFLINE:
        return  # No online request waits for the end of such a step.
    batch.offline_budget_s = min(
        batch.offline_budget_s,
        budget_s * (1 - margin),
        _gap_budget_s(batch, context) * (1 - margin),
        context.arrival_s,
    )


def _prefill_before_decodes(batch: StepBuilder, context: PlanContext, budget_s: float) -> None:
    """Add online prefills without decodes; only the decodes if no prompt finds memory."""
    decodes_kv = batch.memory.kv_to_decode(batch.requests.online_decodes)
    batch.memory.free_kv_tokens -= decodes_kv  # Reserved for the decodes of the next step.
    prefill_online(batch, context, budget_s, spared_cut=_SPARED_CUT)
    batch.memory.free_kv_tokens += decodes_kv
    if batch.work.stats.is_empty:
        decode_online(batch)
    else:
        batch.skips_decodes = True
        batch.reserve_rest_for_online(by_deadline=True)


def _time_before_decodes_s(
    batch: StepBuilder, context: PlanContext, budget_s: float
) -> float | None:
    """Return the latency budget of a step with prompts only; None to mix prompts with decodes.

    SGLang stalls the decodes for every prompt. Mixing costs less in total, so it is the default
    here, but it spreads prompts over several steps, each only as long as the decodes' next
    tokens can wait. Prompts run first, without decodes, if fewer targets are then missed: late
    first tokens, plus late gaps, each weighted by 1 / gaps per request. Ties are decided by how
    much longer a request that arrives now would wait than it may (``arrival_s``). No gap becomes
    longer than the TPOT slack plus the TTFT target. O(prompts that fit + requests).
    """
    ttft_s = batch.targets.ttft_s
    prompts = _prompts_that_fit(batch)
    if not batch.requests.online_decodes or not prompts or ttft_s is None:
        return None
    if context.config.overload is Overload.SHED:
        return None  # Prompts that would be late are refused instead.
    memory, decodes_slack_s = batch.memory, batch.deadlines.slack_s
    if math.isinf(decodes_slack_s) or not memory.has_room(
        memory.kv_to_decode(batch.requests.online_decodes),
        requests=len(batch.requests.online_decodes),
    ):
        return None
    contexts = sum([request.computed_tokens for request in batch.requests.online_decodes])
    decodes_s = batch.work.predict_with_decodes(len(batch.requests.online_decodes), contexts)
    share = 1 - context.config.margin
    limit_s = min(budget_s, decodes_slack_s + ttft_s) * share - decodes_s
    alone_s = batch.work.predict_with_whole(prompts, batch.free_tokens)
    if (
        alone_s > limit_s
        and batch.work.predict_with_whole(prompts[:1], batch.free_tokens) > limit_s
    ):
        return None
    first_s = min(alone_s, limit_s)
    chunk_s = min(budget_s, decodes_slack_s) * share - decodes_s
    beside_s = alone_s + decodes_s * _mixed_chunks(prompts, alone_s, chunk_s, context)
    slacks_s = [slack_s(batch, request) * share for request in prompts]
    done = list(accumulate([request.tokens_to_compute for request in prompts]))

    def misses(prompts_end_s: float, decodes_end_s: float) -> tuple[float, float]:
        token_s = prompts_end_s / done[-1]
        ends_s = [tokens * token_s for tokens in done]
        late = sum([left_s < end_s for left_s, end_s in zip(slacks_s, ends_s, strict=True)])
        late_gaps = batch.deadlines.num_late(decodes_end_s) / context.gaps_per_request
        return late + late_gaps, max(prompts_end_s - context.arrival_s, 0.0)

    kept_s = min(alone_s, max(chunk_s, 0.0)) + decodes_s
    is_better = misses(alone_s, first_s + decodes_s) < misses(beside_s, kept_s)
    return limit_s if is_better else None


def _prompts_that_fit(batch: StepBuilder) -> list[Request]:
    """Return the first prompts that together fit the token budget of a step."""
    left_tokens = batch.free_tokens
    fitting = []
    for request in chain(batch.requests.online_prefills, batch.snapshot.waiting):
        left_tokens -= request.tokens_to_compute
        if left_tokens < 0:
            break
        fitting.append(request)
    return fitting


def _mixed_chunks(
    prompts: Sequence[Request], alone_s: float, chunk_s: float, context: PlanContext
) -> int:
    """Return the number of steps to compute prompts that get ``chunk_s`` of each mixed step."""
    floor_tokens = context.config.min_online_chunk_tokens
    if chunk_s > 0:
        return math.ceil(alone_s / chunk_s)
    return math.ceil(_tokens(prompts) / floor_tokens) if floor_tokens else 1


def _tokens(prompts: Sequence[Request]) -> int:
    return sum([request.tokens_to_compute for request in prompts])


def _gap_budget_s(batch: StepBuilder, context: PlanContext) -> float:
    """Return the latency budget that the decodes leave for a batch with offline work: the batch so
    far plus ``gap_share`` of the slack left after it."""
    spare_s = batch.deadlines.offline_slack_s - batch.work.predicted_s
    return batch.work.predicted_s + (context.gap_share * spare_s if spare_s > 0 else spare_s)


def decode_online(batch: StepBuilder) -> None:
    """Add every online decode.

    If KV is short, offline requests are retracted, then unfinished online prefills, then
    the last of the decodes themselves.
    """
    requests, memory = batch.requests.online_decodes, batch.memory
    while not memory.reclaim(needed := memory.kv_to_decode(requests), requests=len(requests)):
        memory.retract((batch.requests.online_prefills or requests).pop(), needed)
    batch.decode(requests)


def prefill_online(
    batch: StepBuilder,
    context: PlanContext,
    budget_s: float,
    *,
    keeps_ttft: bool = True,
    may_retract: bool = True,
    spared_cut: float = 0.0,
) -> None:
    """Add online prefills in order: the unfinished ones, then the waiting ones.

    Stops at the first that does not fit, so that no later request overtakes it. A prompt that
    exceeds the budget by at most the share ``spared_cut`` is not cut. Without ``keeps_ttft`` only
    targets that requests bring along count as TTFT deadlines; under ``Overload.SHED`` all
    targets do. Sets ``offline_budget_s`` (see ``serve_online``).
    """
    config = context.config
    sheds = config.overload is Overload.SHED
    floor_tokens = 0 if sheds else config.min_online_chunk_tokens
    slack_share = 1 - config.margin
    ttft_s = more_s = math.inf
    if config.online_order is OnlineOrder.VTC and batch.targets.ttft_s is not None:
        # A request of another tenant may arrive, wait for this step and then take a step as long.
        # In a pair of runs its P99 TTFT was 160 ms with this and 432 without (bench_overload.py).
        more_s = batch.targets.ttft_s / 2 * slack_share
    # If all prompts together fit, this one prediction replaces one for each request.
    all_s = batch.work.predict_with_whole(
        chain(batch.requests.online_prefills, batch.snapshot.waiting), batch.free_tokens
    )
    for request, is_new in _prefills(batch, context):
        rest_tokens = request.tokens_to_compute
        cached_tokens = request.computed_tokens or request.cached_tokens
        has_deadline = keeps_ttft or sheds or request.info.ttft_target_s is not None
        request_slack_s = slack_s(batch, request) if has_deadline else math.inf
        if all_s <= budget_s and all_s <= request_slack_s:
            whole_s = all_s
        else:
            whole_s = batch.work.predict_with_prefill(rest_tokens, cached_tokens)
        is_fresh = is_new and request.generated_tokens == 0
        if sheds and is_fresh and whole_s > request_slack_s * context.shed_share:
            batch.shed(request)
            continue
        deadline_s = ttft_s
        if (
            whole_s > ttft_s
            and not sheds
            and _is_late_next(batch, rest_tokens, cached_tokens, request_slack_s)
        ):
            deadline_s = math.inf
            batch.is_deadline_bound = True
        if batch.chunks:
            budget_s = min(budget_s, more_s)
        whole_limit_s = min(budget_s * (1 + spared_cut), deadline_s)
        if whole_s <= whole_limit_s and rest_tokens <= batch.free_tokens:
            tokens = rest_tokens
        else:
            limit_s = min(budget_s, deadline_s)
            tokens = _cut(batch, cached_tokens, rest_tokens, limit_s, floor_tokens)
        if tokens == 0:
            batch.reserve_rest_for_online(by_deadline=batch.free_tokens > 0)
            return
        kv_tokens = batch.memory.kv_to_prefill(cached_tokens, rest_tokens, is_new=is_new)
        has_room = batch.memory.has_room(kv_tokens, is_new)
        if not has_room and not (may_retract and batch.memory.reclaim(kv_tokens, is_new)):
            batch.admits_offline = False
            break
        batch.prefill(request.info.rid, tokens, cached_tokens, kv_tokens, is_new=is_new)
        floor_tokens = 0
        if tokens < rest_tokens:
            batch.reserve_rest_for_online(by_deadline=batch.free_tokens > 0)
            return
        if whole_s > request_slack_s:
            batch.reserve_rest_for_online(by_deadline=True)
        else:
            ttft_s = min(ttft_s, request_slack_s * slack_share)
    batch.offline_budget_s = min(batch.offline_budget_s, budget_s, ttft_s)


def _is_late_next(batch: StepBuilder, tokens: int, context_tokens: int, slack_s: float) -> bool:
    """Return whether a prompt would be late if it ran in the step after the batch so far."""
    alone_s = batch.model.predict(StepStats.of([(tokens, context_tokens)]))
    return batch.work.predicted_s + alone_s > slack_s


def slack_s(batch: StepBuilder, request: Request) -> float:
    """Return the time until a request's next token misses its target; negative once it has."""
    info, targets = request.info, batch.targets
    if request.generated_tokens and request.last_token_s is not None:
        start_s, target_s = request.last_token_s, info.tpot_target_s or targets.tpot_s
    else:
        start_s, target_s = info.arrival_s, info.ttft_target_s or targets.ttft_s
    return math.inf if target_s is None else start_s + target_s - batch.snapshot.now_s


def _prefills(batch: StepBuilder, context: PlanContext) -> Iterator[tuple[Request, bool]]:
    for request in batch.requests.online_prefills:
        yield request, False
    for request in context.waiting:
        yield request, True


def _cut(
    batch: StepBuilder, cached_tokens: int, rest_tokens: int, budget_s: float, floor_tokens: int
) -> int:
    """Return the longest chunk within the budget, but at least ``floor_tokens``."""
    tokens = batch.longest_chunk(cached_tokens, rest_tokens, budget_s)
    if tokens == 0 and batch.work.stats.is_empty:
        # A budget that even the smallest batch exceeds must not stop the engine.
        tokens = batch.longest_chunk(cached_tokens, rest_tokens, math.inf)
    floor_tokens = min(floor_tokens, rest_tokens, batch.free_tokens)
    return max(tokens, batch.memory.align_chunk(cached_tokens, rest_tokens, floor_tokens))
