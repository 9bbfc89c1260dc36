"""Builders of what a scheduler sees, so that a test reads as a scenario."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.slo import deadlines, parse_slo
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.request import RequestClass, RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import EngineSnapshot, PrefixCache, Request, RequestInfo
from sglang_coserve.core.step import PrefillChunk, ServedRequest, StepPlan, StepResult
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.metrics import SloTargets

# 10 ms a step, 0.1 ms a token, and a little for context.
MODEL = PolynomialModel.of(
    compute_token_s=1e-4, attention_pair_s=1e-9, context_token_s=1e-7, iteration_s=0.010
)
TARGETS = SloTargets(ttft_s=1.0, tpot_s=0.1)

_numbers = itertools.count()
_first_tokens = itertools.count(1 << 40, 1 << 20)
"""First tokens of prompts that share no prefix with the prompts of tests."""


def online(
    prompt_tokens: int = 100,
    state: RequestState = RequestState.WAITING,
    *,
    rid: str | None = None,
    generated: int | None = None,
    computed: int | None = None,
    cached: int = 0,
    arrival_s: float = 0.0,
    last_token_s: float | None = None,
    first_token_s: float | None = None,
    request_class: RequestClass = RequestClass.ONLINE,
    can_pause: bool = True,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
) -> Request:
    """An online request. A decode has produced one token at 0 s, unless told otherwise.

    All tokens of a request came at ``last_token_s``, unless ``first_token_s`` says otherwise.
    """
    decodes = state in (RequestState.DECODING, RequestState.PAUSED)
    if generated is None:
        generated = 1 if decodes else 0
    if computed is None:
        computed = prompt_tokens + generated - 1 if decodes else 0
    if last_token_s is None and generated:
        last_token_s = 0.0
    if first_token_s is None:
        first_token_s = last_token_s
    info = RequestInfo(
        rid=rid or f"{request_class.value}-{next(_numbers)}",
        request_class=request_class,
        prompt_tokens=prompt_tokens,
        max_new_tokens=64,
        arrival_s=arrival_s,
        ttft_target_s=ttft_s,
        tpot_target_s=tpot_s,
        can_pause=can_pause,
    )
    return Request(info, state, generated, computed, cached, last_token_s, first_token_s)


def offline(
    prompt_tokens: int = 100, state: RequestState = RequestState.DECODING, **fields: object
) -> Request:
    """An offline request that holds KV; see ``online``."""
    return online(prompt_tokens, state, request_class=RequestClass.OFFLINE, **fields)  # type: ignore[arg-type]


def queued(
    prompt_tokens: int = 100,
    *,
    rid: str | None = None,
    arrival_s: float = 0.0,
    deadline_s: float | None = None,
    first: int = 0,
) -> QueuedRequest:
    """An offline request that waits.

    Once a snapshot has ``offline(rid=…)`` with the same rid, it runs.
    """
    return QueuedRequest(
        rid=rid or f"queued-{next(_numbers)}",
        token_ids=pack_tokens(range(first, first + prompt_tokens)),
        arrival_s=arrival_s,
        max_new_tokens=64,
        deadline_s=deadline_s,
    )


def snapshot(*requests: Request, now_s: float = 0.0, **engine: Any) -> EngineSnapshot:
    """An engine with these requests, and room for more; those without KV wait."""
    room = {"free_kv_tokens": 100_000, "evictable_kv_tokens": 0}
    limits = {"free_slots": 1000, "max_batch_tokens": 8192}
    return EngineSnapshot(
        now_s=now_s,
        admitted=[one for one in requests if one.state is not RequestState.WAITING],
        waiting=[one for one in requests if one.state is RequestState.WAITING],
        **{**room, **limits, **engine},
    )


class Cache:
    """A prefix cache with known contents."""

    def __init__(self, cached_tokens: Mapping[str, int | None] | None = None) -> None:
        self._cached_tokens = dict(cached_tokens or {})

    def cached_tokens(self, rid: str) -> int | None:
        return self._cached_tokens.get(rid, 0)


NO_CACHE = Cache()


class SceneScheduler(Scheduler):
    """A scheduler to which a test need not tell which offline requests have begun.

    As in an engine, the queue knows every offline request that holds KV: the request leaves the
    queue with the first snapshot that has it. A request that was never queued is queued first.
    """

    def plan(self, snapshot: EngineSnapshot, cache: PrefixCache) -> StepPlan:
        for request in (*snapshot.admitted, *snapshot.elsewhere):
            info = request.info
            if info.is_online or self.queue.is_running(info.rid):
                continue
            if info.rid not in self.queue:
                self.queue.add(queued(info.prompt_tokens, rid=info.rid, first=next(_first_tokens)))
            self.queue.take(info.rid)
        return super().plan(snapshot, cache)


def scheduler(
    policy: str | Policy = "conserve",
    *waiting: QueuedRequest,
    targets: SloTargets = TARGETS,
    slos: Sequence[str] = (),
    model: PolynomialModel = MODEL,
    engine: EngineSize | None = None,
    **config: object,
) -> Scheduler:
    """A scheduler whose predictions are right, so that budgets are the numbers of the scenario.

    ``slos`` stand in the place of ``targets``.
    """
    if isinstance(policy, str):
        policy = make_policy(policy)
    settings = SchedulerConfig(**config)  # type: ignore[arg-type]
    promised = tuple(map(parse_slo, slos)) or deadlines(targets)
    made = SceneScheduler(policy, model, promised, settings, engine=engine)
    for request in waiting:
        made.add_offline(request)
    return made


def ran(
    brain: Scheduler,
    plan: StepPlan,
    seen: EngineSnapshot,
    *,
    seconds: float | None = None,
    admitted: Sequence[PrefillChunk] | None = None,
) -> StepResult:
    """Carry a plan out, as a whole unless told otherwise, in the time that was predicted."""
    chunks = tuple(plan.prefills if admitted is None else admitted)
    brain.start(plan, chunks)
    result = result_of(plan, seen, chunks=chunks, seconds=seconds)
    brain.update(result)
    return result


def decoded_for(brain: Scheduler, *, tokens: int, token_s: float) -> None:
    """Let an offline request generate ``tokens``, one every ``token_s``, before 0 s."""
    brain.add_offline(queued(100, rid="before"))
    requests: tuple[Request, ...] = ()
    for number in range(tokens + 1):
        seen = snapshot(*requests, now_s=(number - tokens - 1) * token_s)
        ran(brain, brain.plan(seen, NO_CACHE), seen)
        requests = (offline(100, rid="before", generated=number + 1),)
    brain.finish("before")


def result_of(
    plan: StepPlan,
    seen: EngineSnapshot,
    *,
    chunks: Sequence[PrefillChunk],
    seconds: float | None = None,
) -> StepResult:
    """What an engine would say of a step with these chunks."""
    seconds = plan.predicted_s if seconds is None else seconds
    left = {chunk.rid: chunk.tokens for chunk in chunks}
    out = {retraction.rid for retraction in plan.retract} | {*plan.pause}
    decodes = [
        request
        for request in seen.admitted
        if request.info.rid not in out
        and not plan.skips_decodes
        and (request.state is RequestState.DECODING or request.info.rid in plan.resume)
    ]
    prefills = [request for request in (*seen.admitted, *seen.waiting) if request.info.rid in left]
    contexts = {
        request.info.rid: request.computed_tokens or request.cached_tokens for request in prefills
    }
    served = [ServedRequest(request.info, seen.now_s + seconds) for request in decodes]
    served += [
        ServedRequest(
            request.info,
            seen.now_s + seconds if left[request.info.rid] == request.tokens_to_compute else None,
        )
        for request in prefills
    ]
    return StepResult(
        step=plan.step,
        started_s=seen.now_s,
        seconds=seconds,
        batch=StepStats.of(
            [(tokens, contexts.get(rid, 0)) for rid, tokens in left.items()],
            [request.computed_tokens for request in decodes],
        ),
        chunks=tuple(chunk for chunk in chunks if chunk.rid in left),
        served=tuple(each for each in served if each.info.is_online),
    )


def rids(requests: Sequence[Request]) -> tuple[str, ...]:
    return tuple(request.info.rid for request in requests)
