"""The step being planned: who may be in it, the work added so far, and how long it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from sglang_coserve.core.control.allowance import Allowance, Targets
from sglang_coserve.core.control.pace import pace_s
from sglang_coserve.core.control.shadow_kv import Protection
from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.learned_times import OfflineShape
from sglang_coserve.core.offline_queue import OfflineQueue, QueuedRequest
from sglang_coserve.core.planning.step_memory import Prompt, StepMemory
from sglang_coserve.core.request import RequestClass, RequestState
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import EngineSnapshot, PrefixCache, Request, RequestInfo
from sglang_coserve.core.step import Bound, Lane, PrefillChunk, PromptStop, StepPlan
from sglang_coserve.core.step_stats import StepStats

_CATCH_UP: Final = 2.0
"""Speed, in multiples of its TPOT target, at which a stream catches up after a long gap."""

_LONGEST_GAP: Final = 4.0
"""Longest gap, in multiples of its TPOT target, for which a stream may have saved time."""

_MOST_PASSED: Final = 1024
"""Most waiting requests of a plan that are passed over as too long; bounds the planning time."""

_DECODING = RequestState.DECODING
_PAUSED = RequestState.PAUSED
_PREFILLING = RequestState.PREFILLING
_ONLINE = RequestClass.ONLINE


@dataclass(frozen=True, slots=True)
class PlanContext:
    """The engine, and the state of the scheduler, during one call of ``plan``."""

    snapshot: EngineSnapshot
    model: LatencyModel
    config: SchedulerConfig
    queue: OfflineQueue
    cache: PrefixCache
    allowance: Allowance
    victims: Callable[[StepBuilder], Sequence[Request]]
    """Returns the offline requests in the order in which they are to be retracted."""

    step: int
    """Number of the step; together with the seed it makes random draws reproducible."""

    prompt_s: float
    """Longest time, in seconds, that the step may add to the TTFT of the requests that wait."""

    resume_s: float
    """What it costs to suspend a step and resume it."""

    offline_shape: OfflineShape
    """Mean lengths of offline requests."""

    protection: Protection
    """KV that offline requests leave to the prefixes of recent online requests."""

    decodes_alone: int
    """How many online requests would decode without offline work."""

    timely: float
    """Share of a time until which a step must be predicted to end, to end in that time."""

    averages_tpot: bool
    """TPOT targets are means over a request: a short gap makes up for a long gap. If false, they
    limit each gap."""

    is_plain: bool
    """Online work runs as in plain SGLang: no offline work is there, and no target asks for
    other latencies."""

    mixes_decodes: bool
    """Plain SGLang would run decodes in the same step as prompts, instead of after them."""


class StepBuilder:
    """Collects the work of one step during a call of ``Scheduler.plan``.

    A policy adds work of the requests here, and of the queues, as long as there are tokens left,
    and KV and request slots in ``memory``. Latency limits are up to the policy.
    """

    def __init__(self, context: PlanContext, lane: Lane = Lane.SHARED) -> None:
        """Start with an empty batch, and sort the admitted requests. O(requests).

        In the lane of offline requests, no online one holds KV.
        """
        self.snapshot = snapshot = context.snapshot
        self.model = context.model
        self.context = context
        self.lane = lane
        self.online_decodes: list[Request] = []
        """Online requests that decode or are paused."""
        self.online_prefills: list[Request] = []
        """Online requests whose prefill is unfinished, the running one first."""
        self.offline_decodes: list[Request] = []
        """Offline requests that decode or are paused. Requests that cannot pause come first,
        because ``build`` retracts them where it pauses others. Otherwise they are in order of
        admission; a policy may choose another order."""
        self.offline_prefills: list[Request] = []
        """Offline requests whose prefill is unfinished, the running one first."""
        self._staying: list[Request] = []
        """Paused offline decodes that do not join this step."""
        self._prefills: list[Request] = []
        """All whose prefill is unfinished, in order of admission."""
        self._has_paused = False
        self._sort()
        self.stall_s = 0.0
        """Time in seconds by which online prompts may exceed the pace of streams, to stall decodes
        as long as they do alone; 0 without a pace."""

        self.targets = self._targets()
        """Limits for online requests without own targets."""

        self.stats = StepStats()
        """Sums over the batch so far."""
        self._asked: tuple[StepStats, float] = (self.stats, 0.0)
        """The last batch that was predicted, and its latency."""
        self.offline_budget_s = math.inf
        """Longest time, in seconds, that the whole batch may take once it has offline work. Set by
        ``limit_offline`` and ``raise_offline``."""
        self.bound_by = Bound.NONE
        """The reason for ``offline_budget_s``."""
        self.prompt_stop: PromptStop | None = None
        """The reason why not all online prompts are in the step; set by ``prefill_online``."""

        self.is_deadline_bound = False
        self.online_part_s = 0.0
        self.prompts_s = 0.0
        """Predicted latency of the step's online prompts alone."""
        self.skips_decodes = False
        """The step runs prompts only: no request decodes in it."""
        self.admits_offline = True
        """Whether new offline requests may start. They may not while an online request waits for
        KV."""
        self.free_tokens = snapshot.max_batch_tokens
        self.shed: list[str] = []
        """Waiting online requests that are refused."""
        self.memory = StepMemory(snapshot, lambda: context.victims(self), context.protection)

    def _sort(self) -> None:
        online_decodes, offline_decodes = self.online_decodes, self.offline_decodes
        is_alone = self.lane is Lane.OFFLINE
        num_steady = 0
        for request in self.snapshot.admitted:
            info, state, _, _, _, _, _ = request
            is_online = info.request_class is _ONLINE
            if state is _PAUSED:
                self._has_paused = True
            elif state is not _DECODING:
                self._prefills.append(request)
                prefills = self.online_prefills if is_online else self.offline_prefills
                # The engine runs one unfinished prefill at a time: it continues first.
                prefills.insert(0 if state is _PREFILLING else len(prefills), request)
                continue
            if is_online:
                online_decodes.append(request)
            elif info.can_pause:
                offline_decodes.append(request)
            elif state is _PAUSED and not is_alone:
                # It would have to be retracted whenever it does not fit.
                self._staying.append(request)
            else:
                offline_decodes.insert(num_steady, request)
                num_steady += 1

    def _targets(self) -> Targets:
        """Return the limits of the allowance; without one for gaps, the pace of streams."""
        targets, slowdown = self.context.allowance.targets, self.context.config.stream_slowdown
        if slowdown is None or targets.token_s is not None or not self.online_decodes:
            return targets
        alone = self.context.decodes_alone
        limit_s = pace_s(self.model, self.online_decode_stats, alone, slowdown)
        self.stall_s = max(self.context.allowance.stall_s - limit_s, 0.0)
        return targets._replace(gap_s=limit_s)

    # --- who is there ---

    @property
    def has_online(self) -> bool:
        """True when an online request waits or runs, in this or another micro-batch."""
        return (
            bool(self.online_decodes)
            or self.has_online_prompts
            or any(request.info.is_online for request in self.snapshot.elsewhere)
        )

    @property
    def has_online_prompts(self) -> bool:
        """True when an online prompt waits, or is computed in part."""
        return bool(self.online_prefills or self.snapshot.waiting)

    def first_prompts(self, tokens: int) -> list[Request]:
        """Return the first online prompts that have so many tokens together, or all. O(tokens).

        In order of arrival. Those that wait are described when they are reached.
        """
        first: list[Request] = []
        for requests in (self.online_prefills, self.snapshot.waiting):
            for request in requests:
                first.append(request)
                tokens -= request.tokens_to_compute
                if tokens <= 0:
                    return first
        return first

    @property
    def offline(self) -> list[Request]:
        """All offline requests that hold KV."""
        return self.offline_decodes + self._staying + self.offline_prefills

    @cached_property
    def offline_reach_tokens(self) -> int:
        """The KV that a new offline request could have if all offline work had ended. O(requests).

        A longer request waits for online requests, whatever offline work does.
        """
        seen = self.snapshot
        held = [request for request in seen.admitted if request.info.is_online]
        per_request = self.context.config.headroom_tokens
        headroom_tokens = self.memory.headroom_tokens(per_request, len(held) + len(seen.elsewhere))
        return self.memory.drained_kv_tokens - headroom_tokens

    def candidates(self, most_tokens: float = math.inf) -> Iterator[tuple[QueuedRequest, Prompt]]:
        """Yield the queued requests that may be admitted, and what the prefix cache leaves of each.

        Without those whose KV is being loaded, and without those longer than ``most_tokens``, of
        which it passes over a thousand at most. Each is looked up when it is reached.
        """
        num_passed = 0
        for request in self.context.queue.candidates(self.snapshot.now_s):
            if request.num_prompt_tokens + request.num_generated_tokens > most_tokens:
                num_passed += 1
                if num_passed > _MOST_PASSED:
                    return
                continue
            cached_tokens = self.context.cache.cached_tokens(request.rid)
            if cached_tokens is not None:
                yield request, Prompt.queued(request, cached_tokens)

    def keep_paused(self) -> None:
        """Let no paused offline decode join this step. O(requests)."""
        self._staying += [one for one in self.offline_decodes if one.state is _PAUSED]
        self.offline_decodes = [one for one in self.offline_decodes if one.state is not _PAUSED]

    # --- when online decodes are due ---

    @cached_property
    def elsewhere_s(self) -> float:
        """The strictest limit per token of the online requests in other micro-batches; infinite
        without one."""
        infos = [request.info for request in self.snapshot.elsewhere if request.info.is_online]
        targets_s = [self._own_tpot_s(info) or self.targets.token_s for info in infos]
        return min([target_s for target_s in targets_s if target_s is not None], default=math.inf)

    @cached_property
    def slack_s(self) -> float:
        """Longest time, in seconds, that the step may take before an online decode is due.

        A decode in another micro-batch is assumed to have got its last token just now. O(requests).
        """
        least_s = min([self._token_left_s(one) for one in self.online_decodes], default=math.inf)
        return min(least_s, self.elsewhere_s)

    @cached_property
    def decodes_s(self) -> float:
        """Predicted latency of a step of the online decodes alone. O(requests)."""
        return self.model.predict(self.online_decode_stats)

    def _own_tpot_s(self, info: RequestInfo) -> float | None:
        """Return a request's own TPOT target; None without one, or if not even a step of online
        decodes alone keeps it. Such a target would keep offline work from all clients in vain."""
        own_s = info.tpot_target_s
        return None if own_s is None or own_s < self.decodes_s else own_s

    def _token_left_s(self, request: Request) -> float:
        """Return how long the step may take before the next token of a stream is due.

        Negative for a token that is due before the step begins; infinite without a limit.
        """
        info, _, generated_tokens, _, _, last_s, first_s = request
        begins_s, targets = self.snapshot.begins_s, self.targets
        since_last_s = 0.0 if last_s is None else begins_s - last_s
        tpot_s, gap_s = self._own_tpot_s(info), None
        if tpot_s is None:
            tpot_s, gap_s = targets.tpot_s, targets.gap_s
        left_s = math.inf if gap_s is None else gap_s - since_last_s
        if tpot_s is None:
            return left_s
        if not self.context.averages_tpot:
            return min(left_s, tpot_s - since_last_s)
        since_first_s = 0.0 if first_s is None else begins_s - first_s
        credit_s = tpot_s * generated_tokens - since_first_s
        least_s, most_s = tpot_s / _CATCH_UP - since_last_s, tpot_s * _LONGEST_GAP - since_last_s
        return min(left_s, max(credit_s, least_s), most_s)

    def left_s(self, request: Request) -> float:
        """Return how long the step may take before a request's next token misses its target.

        Negative if it misses it before the step begins.
        """
        if request.generated_tokens:
            return self._token_left_s(request)
        target_s = request.info.ttft_target_s or self.targets.ttft_s
        if target_s is None:
            return math.inf
        return request.info.arrival_s + target_s - self.snapshot.begins_s

    def due_s(self, request: Request) -> float:
        """Return how long others may keep a request's next token waiting.

        As ``left_s``, but an own TTFT target that an idle engine would miss counts as none.
        """
        left_s, own_s = self.left_s(request), request.info.ttft_target_s
        if own_s is None or request.generated_tokens:
            return left_s
        prompt = Prompt.of(request)
        alone = StepStats().with_prefill(prompt.rest_tokens, prompt.context_tokens)
        if own_s >= self.model.predict(alone):
            return left_s
        target_s = self.targets.ttft_s
        return math.inf if target_s is None else left_s + target_s - own_s

    def least_tpot_s(self, default_s: float) -> float:
        """Return the strictest limit per token of the online decodes, in seconds. O(requests).

        ``default_s`` is the limit of requests without an own target, and the result if no online
        request decodes.
        """
        targets_s = [self._own_tpot_s(one.info) or default_s for one in self.online_decodes]
        return min(min(targets_s, default=default_s), self.elsewhere_s)

    # --- how long it takes ---

    @cached_property
    def online_decode_stats(self) -> StepStats:
        """Sums over a step of the online decodes alone. O(requests)."""
        return StepStats().with_decodes(*_sums(self.online_decodes))

    @property
    def predicted_s(self) -> float:
        """Predicted latency of the batch so far, in seconds; 0 while it is empty."""
        return self._predict(self.stats)

    def predict_with_decodes(self, count: int, context_tokens: int) -> float:
        """Return the latency in seconds with ``count`` more decodes, whose contexts sum up to
        ``context_tokens``."""
        return self._predict(self.stats.with_decodes(count, context_tokens))

    def predict_with_prefill(self, tokens: int, context_tokens: int) -> float:
        """Return the latency in seconds with one more prefill request."""
        return self._predict(self.stats.with_prefill(tokens, context_tokens))

    def _predict(self, stats: StepStats) -> float:
        if stats != self._asked[0]:
            self._asked = stats, self.model.predict(stats)
        return self._asked[1]

    # --- what is added ---

    def limit_offline(self, seconds: float, why: Bound) -> None:
        """Let the batch take at most ``seconds`` once it has offline work; 0 means none at all.

        The least of all limits counts, and so does its reason.
        """
        if seconds < self.offline_budget_s:
            self.offline_budget_s, self.bound_by = seconds, why

    def raise_offline(self, seconds: float, why: Bound) -> None:
        """Let the batch take at least ``seconds``, whatever the limits so far."""
        if seconds > self.offline_budget_s:
            self.offline_budget_s, self.bound_by = seconds, why

    def limit_tokens(self, tokens: int) -> None:
        """Add at most ``tokens`` more tokens to the batch. A limit above 0 leaves a piece of a
        prompt (``ChunkRules``)."""
        if tokens > 0:
            tokens = max(tokens, self.snapshot.chunk_rules.align_tokens)
        self.free_tokens = min(self.free_tokens, tokens)

    def decode(self, requests: Sequence[Request]) -> None:
        """Add decodes; the caller has checked that there is KV for them. O(requests)."""
        if not requests:
            return
        self.stats = self.stats.with_decodes(*_sums(requests))
        self.memory.take_for_decodes(requests)
        self.free_tokens -= len(requests)

    def longest_chunk(self, prompt: Prompt, budget_s: float) -> int:
        """Return the longest chunk that keeps the batch within the latency budget, in tokens."""
        context_tokens = prompt.context_tokens
        tokens = self.most_tokens(prompt, self.free_tokens, self.stats)
        may_be_cut = tokens > 0 and budget_s < math.inf
        # Mostly it fits whole; the prediction is kept for when it is added.
        if may_be_cut and self.predict_with_prefill(tokens, context_tokens) > budget_s:
            tokens = self.model.max_prefill_tokens(self.stats, context_tokens, tokens, budget_s)
        return self.memory.align_chunk(prompt, tokens)

    def shortest_chunk(self, prompt: Prompt, beside: int = 0) -> int:
        """Return the fewest tokens of a prompt that the engine computes in this step.

        0 if the step has no room for them ``beside`` so many other tokens.
        """
        page = self.snapshot.page_tokens
        tokens = self.snapshot.chunk_rules.shortest_piece(prompt.rest_tokens)
        tokens = min(-(-tokens // page) * page, prompt.rest_tokens)
        has_room = tokens <= self.most_tokens(prompt, self.free_tokens - beside, self.stats)
        return self.memory.align_chunk(prompt, tokens) if has_room else 0

    def most_tokens(self, prompt: Prompt, free_tokens: int, stats: StepStats) -> int:
        """Return the most tokens of a prompt that join ``stats``, whatever they take.

        A prompt that must not be cut may exceed a step, as its only one.
        """
        is_only_one = not self.snapshot.chunk_rules.may_cut and not stats.prefill_tokens
        return prompt.rest_tokens if is_only_one else min(prompt.rest_tokens, free_tokens)

    def prefill(self, prompt: Prompt, tokens: int) -> None:
        """Add a chunk of a prompt; the caller has checked that there is KV for all of it."""
        most_tokens = self.most_tokens(prompt, self.free_tokens, self.stats)
        assert 0 < tokens <= most_tokens, f"{prompt}: {tokens} of {most_tokens} tokens"
        self.stats = self.stats.with_prefill(tokens, prompt.context_tokens)
        self.memory.take_for_prefill(prompt, tokens, beside=self.offline_decodes)
        self.free_tokens -= tokens

    # --- the plan ---

    @property
    def chunks(self) -> tuple[PrefillChunk, ...]:
        """The prefill chunks added so far, in order."""
        return tuple(self.memory.chunks.values())

    def build(self, until_s: float = math.inf) -> StepPlan:
        """Return the plan: decodes not added pause, prefills not added are parked. O(requests).

        A decode that cannot pause is retracted instead. All but its last page stays in the prefix
        cache as long as there is room, so that little is computed again.
        """
        memory, is_alone = self.memory, self.lane is Lane.OFFLINE
        assert memory.free_kv_tokens >= 0, f"KV over capacity by {-memory.free_kv_tokens} tokens"
        num_decodes = sum(map(len, memory.decodes))
        if is_alone and not num_decodes:
            self.skips_decodes = True
        # In the offline lane it is the paused requests that decode.
        runs_as, joins_from = (_PAUSED, _DECODING) if is_alone else (_DECODING, _PAUSED)
        all_go_on = num_decodes == len(self.snapshot.admitted) - len(self._prefills)
        all_stay = all_go_on and not is_alone and not self._has_paused
        only_prefills = self.skips_decodes or all_stay
        decoding = set[str]() if only_prefills else memory.decoding()
        pause: list[str] = []
        resume: list[str] = []
        park: list[str] = []
        for request in self._prefills if only_prefills else self.snapshot.admitted:
            info, state, _, _, _, _, _ = request
            rid = info.rid
            if rid in memory.retractions:
                continue
            if state is runs_as:
                if rid in decoding:
                    continue
                if is_alone or not info.can_pause:
                    memory.retract(request, 0)
                else:
                    pause.append(rid)
            elif state is joins_from:
                if rid in decoding:
                    (pause if is_alone else resume).append(rid)
            elif state is _PREFILLING and rid not in memory.chunks:
                park.append(rid)
        has_prompts = self.has_online_prompts
        added_s = self.predicted_s - (self.prompts_s if has_prompts else self.online_part_s)
        return StepPlan(
            step=self.context.step,
            lane=self.lane,
            until_s=until_s,
            shed=tuple(self.shed),
            retract=tuple(memory.retractions.values()),
            pause=tuple(pause),
            resume=tuple(resume),
            park=tuple(park),
            prefills=self.chunks,
            skips_decodes=self.skips_decodes,
            batch=self.stats,
            predicted_s=self.predicted_s,
            budget_s=self.offline_budget_s,
            bound_by=self.bound_by,
            prompt_stop=self.prompt_stop,
            online_part_s=self.online_part_s,
            is_deadline_bound=self.is_deadline_bound,
            added_s=max(added_s, 0.0),
            waits_online=has_prompts,
        )


def _sums(requests: Sequence[Request]) -> tuple[int, int]:
    """Return the number of requests, and the sum of their tokens with KV."""
    return len(requests), sum([request.computed_tokens for request in requests])
