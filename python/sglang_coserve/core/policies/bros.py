"""BROS: deadline-ordered packing with replacement (Wan et al., §IV-B, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, ClassVar, Final, NamedTuple

from sglang_coserve.core.planning.offline_phase import decode_offline
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.planning.step_memory import Prompt
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.ranges import POSITIVE
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step import Bound, StepPlan, StepResult
from sglang_coserve.core.step_stats import StepStats

_MAX_BATCH_REQUESTS: Final = 1 << 16
_ITERATION_WEIGHT: Final = 0.1

_GROWTH_TOKENS: Final = 4
"""KV that each running online request is left to grow by when another is admitted. Simulated,
Qwen2.5-32B with 30,000 tokens of KV, 10, 14 and 20 requests/s: P99 TTFT 1.0, 3.6 and 13.9 s; with
none 1.0, 42 and 114 s and 100 times the retractions; with 16 1.7, 3.6 and 13.5 s."""


@dataclass
class BrosPolicy(Policy):
    """Packs the most urgent online requests first; offline ones may replace the least urgent.

    In each step:

    1. Online requests, decodes and prefills alike, ascend by the time left until
       their TTFT or TPOT deadline, less T_avg for every further step they
       need (lines 2–4). They join while the batch has fewer than B_curr requests,
       memory, and a predicted latency within the least residual (lines 5–15).
    2. Offline requests, those with the least KV to restore first, join on the
       same terms; one that does not fit may take the place of the least
       urgent online request (lines 16–36). That one must still be in time one
       average step later: constraint 6, which the listing leaves out.
    3. B_curr doubles unless a deadline stopped step 1, which resets it to B_base
       (*Adaptive Batch Sizing*).

    Only under this policy may online decodes pause and online requests wait for offline ones.

    Differences from the paper: a deadline that is already missed bounds nothing, or one late
    request would stop the engine. Prompts are cut into chunks where the paper
    would leave them waiting. Online requests that overfill the KV wait until those that run have
    some room to grow. Since blocks are not shared bidirectionally (§V), KV to restore is
    KV to compute again, so requests with KV come before the queue.
    """

    name: ClassVar[str] = "bros"

    base_batch_requests: Annotated[int, POSITIVE] = 128
    """B_base."""

    _batch_requests: int = field(default=0, init=False)
    """B_curr; 0 before the first plan."""

    _mean_iteration_s: float | None = field(default=None, init=False)
    """T_avg: moving average of step times in seconds; None before the first measurement."""

    def compose(self, batch: StepBuilder) -> None:
        """See ``Policy.compose``. O(requests log requests), and a prediction for each request."""
        mean_iteration_s = self._mean_iteration_s or 0.0
        online = _by_urgency(batch, mean_iteration_s)
        bound_s = min(_least_residual_s(batch, online), batch.elsewhere_s)
        bound_s *= batch.context.timely
        batch.limit_offline(bound_s, Bound.GAP)

        packing = _Packing(
            batch,
            bound_s,
            max_requests=self._batch_requests or self.base_batch_requests,
        )
        for candidate in _after_retractions(batch, online):
            if not packing.add(candidate):
                # No room for a new request, but running ones may still be added.
                if not candidate.prompt.is_new or packing.stopped_by_bound:
                    break
                batch.admits_offline = False
        batch.is_deadline_bound = packing.stopped_by_bound
        packing.bound_s = batch.offline_budget_s
        for candidate in _offline(batch):
            if not packing.add(candidate) and not packing.replace_last_online(
                candidate, mean_iteration_s
            ):
                break
        packing.apply()

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """See ``Policy.update``: adapt B_curr and T_avg."""
        mean_s = self._mean_iteration_s
        if mean_s is None:
            self._mean_iteration_s = result.seconds
        elif result.seconds is not None:
            self._mean_iteration_s = mean_s + _ITERATION_WEIGHT * (result.seconds - mean_s)
        current = self._batch_requests or self.base_batch_requests
        self._batch_requests = (
            self.base_batch_requests
            if plan.is_deadline_bound
            else min(2 * current, _MAX_BATCH_REQUESTS)
        )


def _by_urgency(batch: StepBuilder, mean_iteration_s: float) -> list[_Candidate]:
    """Return the online requests by residual time (lines 2–3)."""
    chunk_tokens = batch.snapshot.max_batch_tokens
    candidates = []
    for requests in (
        batch.online_decodes,
        batch.online_prefills,
        batch.snapshot.waiting,
    ):
        for request in requests:
            residual_s = batch.left_s(request)
            # Late requests keep the order of their deadlines. Otherwise each one that got a chunk
            # would look less urgent than the others, and they would retract each other forever.
            if residual_s >= 0:
                more_iterations = (request.tokens_to_compute - 1) // chunk_tokens
                residual_s = max(residual_s - more_iterations * mean_iteration_s, 0.0)
            candidates.append(_Candidate.of(request, residual_s))
    return sorted(candidates, key=lambda candidate: candidate.residual_s)


def _least_residual_s(batch: StepBuilder, online: Sequence[_Candidate]) -> float:
    """Return T_min^res (line 4), the least residual of the requests that can still be in time."""
    for candidate in online:
        tokens = min(candidate.prompt.rest_tokens, batch.snapshot.max_batch_tokens)
        if batch.model.predict(candidate.joined(StepStats(), tokens)) <= candidate.residual_s:
            return candidate.residual_s
    return math.inf


def _after_retractions(batch: StepBuilder, online: Sequence[_Candidate]) -> Sequence[_Candidate]:
    """Retract the least urgent online requests until the most urgent has KV to run (§V-B)."""
    running = [candidate for candidate in online if not candidate.prompt.is_new]
    retracted: set[str] = set()
    while running:
        first = running[0]
        needed = batch.memory.kv_to_prefill(first.prompt)
        if batch.memory.reclaim(needed):
            break
        request = running.pop().request
        assert request is not None
        batch.memory.retract(request, needed)
        retracted.add(request.info.rid)
    return [candidate for candidate in online if candidate.prompt.rid not in retracted]


def _offline(batch: StepBuilder) -> Iterator[_Candidate]:
    """Yield the offline requests, first those with no KV to restore (line 17)."""
    for admitted in batch.offline_decodes + batch.offline_prefills:
        if not batch.memory.is_retracted(admitted):
            yield _Candidate.of(admitted)
    if batch.admits_offline:
        candidates = batch.candidates(batch.offline_reach_tokens)
        for _, prompt in islice(candidates, batch.context.config.max_picks):
            yield _Candidate(prompt)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A request that may join the batch: a request of the snapshot, or one of the offline queue."""

    prompt: Prompt
    """What it has to compute next: of a decode, one token."""

    request: Request | None = None
    """None for one of the queue."""

    is_online: bool = False
    is_decode: bool = False
    residual_s: float = math.inf
    """Time until its next token is late."""

    @classmethod
    def of(cls, request: Request, residual_s: float = math.inf) -> _Candidate:
        """Return the candidate for a request of the snapshot."""
        is_decode = request.state in (RequestState.DECODING, RequestState.PAUSED)
        return cls(Prompt.of(request), request, request.info.is_online, is_decode, residual_s)

    def joined(self, stats: StepStats, tokens: int) -> StepStats:
        """Return the sums with ``tokens`` tokens of this request added."""
        if self.is_decode:
            return stats.with_decode(self.prompt.context_tokens)
        return stats.with_prefill(tokens, self.prompt.context_tokens)


class _Choice(NamedTuple):
    candidate: _Candidate
    tokens: int
    kv_tokens: int


class _Packing:
    """Selects candidates under a latency bound and a limit on the number of requests.

    Online candidates may retract offline requests, offline candidates may not. At most
    one prompt is cut: after it, ``add`` refuses any other that would have to be cut.
    """

    def __init__(self, batch: StepBuilder, bound_s: float, max_requests: int) -> None:
        self.stopped_by_bound = False
        """True once a candidate did not fit the latency bound in full."""
        self._batch = batch
        self.bound_s = bound_s
        """Longest predicted latency of the batch with the candidates to come."""

        self._max_requests = max_requests
        self._stats = batch.stats
        self._free_tokens = batch.free_tokens
        self._kv_tokens = 0
        self._slots = 0
        self._online: list[_Choice] = []
        self._offline: list[_Choice] = []
        self._cut: _Candidate | None = None

    @property
    def _num_chosen(self) -> int:
        return len(self._online) + len(self._offline)

    def add(self, candidate: _Candidate) -> bool:
        """Choose a candidate if at least part of it fits; return whether it was chosen.

        O(1) predictions.
        """
        if self._num_chosen >= self._max_requests:
            return False
        tokens = self._longest(candidate)
        if tokens == 0:
            return False
        kv_tokens = self._kv(candidate)
        if candidate.is_online and candidate.prompt.is_new and not self._lets_grow(kv_tokens):
            return False
        if not self._has_room(candidate, kv_tokens) and not (
            candidate.is_online
            and self._batch.memory.reclaim(
                self._kv_tokens + kv_tokens,
                self._slots + candidate.prompt.is_new,
                requests=self._num_chosen + 1,
            )
        ):
            return False
        self._choose(_Choice(candidate, tokens, kv_tokens))
        return True

    def replace_last_online(self, candidate: _Candidate, wait_s: float) -> bool:
        """Replace the online candidate chosen last by another; return whether this was done.

        Done only if that candidate can wait for this step and ``wait_s`` more, and nobody is
        retracted: else offline requests would take in turn what is freed for an online one.
        """
        if not self._online or self._batch.memory.retractions:
            return False
        leaving, bound_s = self._drop_last_online(), self.bound_s
        self.bound_s = min(bound_s, leaving.candidate.residual_s - wait_s)
        if self.add(candidate):
            return True
        self.bound_s = bound_s
        self._choose(leaving)
        return False

    def apply(self) -> None:
        """Add the chosen candidates to the batch."""
        batch = self._batch
        batch.decode(_decodes(self._online))
        self._prefill(self._online)
        decode_offline(batch, _decodes(self._offline))
        self._prefill(self._offline)

    def _prefill(self, choices: list[_Choice]) -> None:
        batch = self._batch
        for candidate, tokens, kv_tokens in choices:
            if candidate.is_decode:
                continue
            # It may have been retracted for an offline decode meanwhile.
            request = candidate.request
            was_retracted = request is not None and batch.memory.is_retracted(request)
            prompt = candidate.prompt
            if not was_retracted and batch.memory.has_room(kv_tokens, prompt.is_new):
                batch.prefill(prompt, tokens)

    def _longest(self, candidate: _Candidate) -> int:
        batch = self._batch
        # The most urgent online request always runs, even over the bound.
        is_first = candidate.is_online and self._stats.is_empty
        bound_s = math.inf if is_first else self.bound_s
        prompt = candidate.prompt
        if candidate.is_decode and not self._stats.prefill_tokens:
            tokens = limit = 1
        else:
            tokens = limit = batch.most_tokens(prompt, self._free_tokens, self._stats)
        if limit <= 0:
            return 0
        if candidate.is_decode:
            tokens = int(batch.model.predict(candidate.joined(self._stats, 1)) <= bound_s)
        elif bound_s < math.inf:
            tokens = batch.model.max_prefill_tokens(
                self._stats, prompt.context_tokens, limit, bound_s
            )
        self.stopped_by_bound |= tokens < limit
        tokens = batch.memory.align_chunk(prompt, tokens)
        return 0 if self._cut is not None and tokens < prompt.rest_tokens else tokens

    def _has_room(self, candidate: _Candidate, kv_tokens: int) -> bool:
        if candidate.is_decode and not candidate.is_online:
            return True  # ``apply`` makes room for it, or leaves it out.
        kv_tokens += self._kv_tokens
        if candidate.prompt.is_new and not candidate.is_online:
            seen = self._batch.snapshot
            num_requests = len(seen.admitted) + len(seen.elsewhere) + self._slots
            per_request = self._batch.context.config.headroom_tokens
            kv_tokens += self._batch.memory.headroom_tokens(per_request, num_requests)
        return self._batch.memory.has_room(
            kv_tokens, self._slots + candidate.prompt.is_new, requests=self._num_chosen + 1
        )

    def _lets_grow(self, kv_tokens: int) -> bool:
        """Return whether the running online requests can grow beside a new one.

        If not, it would take what one of them gave up, and they would retract each other step
        by step. Offline requests give way at any time: beside them it is always so.
        """
        memory = self._batch.memory
        growth_tokens = memory.headroom_tokens(_GROWTH_TOKENS, len(self._batch.online_decodes))
        has_room = memory.has_room(self._kv_tokens + kv_tokens + growth_tokens)
        lets_grow = has_room or memory.next_victim() is not None
        memory.lacks_kv |= not lets_grow  # A suspended step is then dropped for it.
        return lets_grow

    def _kv(self, candidate: _Candidate) -> int:
        if candidate.request is not None and candidate.is_decode:
            return self._batch.memory.kv_to_decode([candidate.request])
        return self._batch.memory.kv_to_prefill(candidate.prompt)

    def _choose(self, choice: _Choice) -> None:
        candidate, tokens, kv_tokens = choice
        (self._online if candidate.is_online else self._offline).append(choice)
        self._stats = candidate.joined(self._stats, tokens)
        self._free_tokens -= tokens
        self._kv_tokens += kv_tokens
        self._slots += candidate.prompt.is_new
        if tokens < candidate.prompt.rest_tokens:
            self._cut = candidate

    def _drop_last_online(self) -> _Choice:
        choice = self._online.pop()
        candidate, tokens, kv_tokens = choice
        sums = zip(self._stats, candidate.joined(StepStats(), tokens), strict=True)
        self._stats = StepStats(*(all_in - its_own for all_in, its_own in sums))
        self._free_tokens += tokens
        self._kv_tokens -= kv_tokens
        self._slots -= candidate.prompt.is_new
        if self._cut is candidate:
            self._cut = None
        return choice


def _decodes(choices: list[_Choice]) -> list[Request]:
    requests = (choice.candidate.request for choice in choices if choice.candidate.is_decode)
    return [request for request in requests if request is not None]
