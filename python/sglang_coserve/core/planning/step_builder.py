"""The step being planned: who may be in it, the work added so far, and how long it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from sglang_coserve.core.control.allowance import Allowance
from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.offline_queue import OfflineQueue, QueuedRequest
from sglang_coserve.core.planning.step_memory import Prompt, StepMemory
from sglang_coserve.core.request import RequestClass, RequestState
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import EngineSnapshot, PrefixCache, Request
from sglang_coserve.core.step import Lane, PrefillChunk, StepPlan
from sglang_coserve.core.step_stats import StepStats

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

    decodes_alone: int
    """How many online requests would decode without offline work."""

    timely: float
    """Share of a time until which a step must be predicted to end, to end in that time."""

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
        self.targets = context.allowance.targets
        """TTFT and TPOT targets of online requests without their own."""

        self.online_decodes: list[Request] = []
        """Online requests that decode or are paused."""
        self.online_prefills: list[Request] = []
        """Online requests whose prefill is unfinished, the running one first."""
        self.offline_decodes: list[Request] = []
        """Offline requests that decode or are paused, in order of admission; those that cannot
        pause before the others."""
        self.offline_prefills: list[Request] = []
        """Offline requests whose prefill is unfinished, the running one first."""
        self._staying: list[Request] = []
        """Paused offline decodes that do not join this step."""
        self._prefills: list[Request] = []
        """All whose prefill is unfinished, in order of admission."""
        self._has_paused = False
        self._sort()

        self.stats = StepStats()
        """Sums over the batch so far."""
        self._asked: tuple[StepStats, float] = (self.stats, 0.0)
        """The last batch that was predicted, and its latency."""
        self.offline_budget_s = math.inf
        """Latency budget of the whole batch, once it has offline work; 0 if an online prompt got
        fewer tokens than it could use."""
        self.is_deadline_bound = False
        self.online_part_s = 0.0
        self.prompts_s = 0.0
        """Predicted latency of the step's online prompts alone."""
        self.skips_decodes = False
        """The step runs prompts only: no request decodes in it."""
        self.admits_offline = True
        """False when an online request waits for KV that new offline requests must not take."""
        self.free_tokens = snapshot.max_batch_tokens
        self.shed: list[str] = []
        """Waiting online requests that are refused."""
        self.memory = StepMemory(snapshot, lambda: context.victims(self))

    def _sort(self) -> None:
        online_decodes, offline_decodes = self.online_decodes, self.offline_decodes
        is_alone = self.lane is Lane.OFFLINE
        num_steady = 0
        for request in self.snapshot.admitted:
            info, state, _, _, _, _ = request
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

    def candidates(self) -> Iterator[tuple[QueuedRequest, Prompt]]:
        """Yield the queued requests that may be admitted, and what the prefix cache leaves of each.

        Without those whose KV is being loaded. Each is looked up when it is reached.
        """
        for request in self.context.queue.candidates(self.snapshot.now_s):
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
        """The strictest TPOT target of the online requests in other micro-batches; infinite
        without one."""
        infos = [request.info for request in self.snapshot.elsewhere if request.info.is_online]
        targets_s = [info.tpot_target_s or self.targets.tpot_s for info in infos]
        return min([target_s for target_s in targets_s if target_s is not None], default=math.inf)

    @cached_property
    def slack_s(self) -> float:
        """How long the step may take before the first online decode misses its TPOT target.

        A decode in another micro-batch is assumed to have got its last token just now. O(requests).
        """
        begins_s, tpot_s = self.snapshot.begins_s, self.targets.tpot_s
        due_s = [
            (begins_s if last_s is None else last_s) + target_s
            for info, _, _, _, _, last_s in self.online_decodes
            if (target_s := info.tpot_target_s or tpot_s) is not None
        ]
        return min(min(due_s, default=math.inf) - begins_s, self.elsewhere_s)

    def left_s(self, request: Request) -> float:
        """Return how long the step may take before a request's next token misses its target.

        Negative if it misses it before the step begins.
        """
        info, targets, begins_s = request.info, self.targets, self.snapshot.begins_s
        start_s, target_s = info.arrival_s, info.ttft_target_s or targets.ttft_s
        if request.generated_tokens:
            start_s = begins_s if request.last_token_s is None else request.last_token_s
            target_s = info.tpot_target_s or targets.tpot_s
        return math.inf if target_s is None else start_s + target_s - begins_s

    def least_tpot_s(self, default_s: float) -> float:
        """Return the strictest TPOT target of the online decodes, in seconds. O(requests).

        ``default_s`` is the target of requests without their own, and the result if no online
        request decodes.
        """
        targets_s = [request.info.tpot_target_s or default_s for request in self.online_decodes]
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

    def limit_tokens(self, tokens: int) -> None:
        """Add at most ``tokens`` more tokens to the batch."""
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
        context_tokens, tokens = prompt.context_tokens, min(prompt.rest_tokens, self.free_tokens)
        may_be_cut = tokens > 0 and budget_s < math.inf
        # Mostly it fits whole; the prediction is kept for when it is added.
        if may_be_cut and self.predict_with_prefill(tokens, context_tokens) > budget_s:
            tokens = self.model.max_prefill_tokens(self.stats, context_tokens, tokens, budget_s)
        return self.memory.align_chunk(prompt, tokens)

    def prefill(self, prompt: Prompt, tokens: int) -> None:
        """Add a chunk of a prompt; the caller has checked that there is KV for all of it."""
        assert 0 < tokens <= self.free_tokens, f"{prompt}: {tokens} of {self.free_tokens} tokens"
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
            info, state, _, _, _, _ = request
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
            online_part_s=self.online_part_s,
            is_deadline_bound=self.is_deadline_bound,
            added_s=max(added_s, 0.0),
            waits_online=has_prompts,
        )


def _sums(requests: Sequence[Request]) -> tuple[int, int]:
    """Return the number of requests, and the sum of their tokens with KV."""
    return len(requests), sum([request.computed_tokens for request in requests])
