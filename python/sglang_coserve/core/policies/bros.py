"""BROS: deadline-ordered packing with replacement (Wan et al., §IV-B, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar, Final

from sglang_coserve.core.planning.online_phase import slack_s
from sglang_coserve.core.planning.packing import Candidate, Packing
from sglang_coserve.core.planning.plan_context import PlanContext
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.step import StepPlan, StepResult
from sglang_coserve.core.step_stats import StepStats

__all__ = ["BrosPolicy"]

_MAX_BATCH_REQUESTS: Final = 1 << 16
_ITERATION_WEIGHT: Final = 0.1


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
    would leave them waiting. Since blocks are not shared bidirectionally (§V), KV to restore is
    KV to compute again, so requests with KV come before the queue.
    """

    name: ClassVar[str] = "bros"

    base_batch_requests: int = 128
    """B_base."""

    _batch_requests: int = field(default=0, init=False)
    """B_curr; 0 before the first plan."""

    _mean_iteration_s: float | None = field(default=None, init=False)
    """T_avg: moving average of step times in seconds; None before the first measurement."""

    def compose(self, batch: StepBuilder, context: PlanContext) -> None:
        """See ``Policy.compose``. O(requests log requests), and a prediction for each request."""
        mean_iteration_s = self._mean_iteration_s or 0.0
        online = _by_urgency(batch, context, mean_iteration_s)
        bound_s = min(_least_residual_s(batch, online), batch.deadlines.elsewhere_s)
        bound_s *= context.timely
        batch.offline_budget_s = bound_s

        packing = Packing(
            batch,
            bound_s,
            max_requests=self._batch_requests or self.base_batch_requests,
            headroom_tokens=context.config.headroom_tokens,
        )
        for candidate in _after_retractions(batch, online):
            if not packing.add(candidate):
                # No room for a new request, but running ones may still be added.
                if not candidate.is_new or packing.stopped_by_bound:
                    break
                batch.admits_offline = False
        batch.is_deadline_bound = packing.stopped_by_bound
        for candidate in _offline(batch, context):
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
            if plan.expected.is_deadline_bound
            else min(2 * current, _MAX_BATCH_REQUESTS)
        )


def _by_urgency(
    batch: StepBuilder, context: PlanContext, mean_iteration_s: float
) -> list[Candidate]:
    """Return the online requests by residual time (lines 2–3)."""
    chunk_tokens = batch.snapshot.max_batch_tokens
    candidates = []
    for requests in (
        batch.requests.online_decodes,
        batch.requests.online_prefills,
        context.waiting,
    ):
        for request in requests:
            residual_s = slack_s(batch, request)
            # Late requests keep the order of their deadlines. Otherwise each one that got a chunk
            # would look less urgent than the others, and they would retract each other forever.
            if residual_s >= 0:
                more_iterations = (request.tokens_to_compute - 1) // chunk_tokens
                residual_s = max(residual_s - more_iterations * mean_iteration_s, 0.0)
            candidates.append(Candidate.of_request(request, residual_s))
    return sorted(candidates, key=lambda candidate: candidate.residual_s)


def _least_residual_s(batch: StepBuilder, online: Sequence[Candidate]) -> float:
    """Return T_min^res (line 4), the least residual of the requests that can still be in time."""
    for candidate in online:
        tokens = min(candidate.rest_tokens, batch.snapshot.max_batch_tokens)
        if batch.model.predict(candidate.joined(StepStats(), tokens)) <= candidate.residual_s:
            return candidate.residual_s
    return math.inf


def _after_retractions(batch: StepBuilder, online: Sequence[Candidate]) -> Sequence[Candidate]:
    """Retract the least urgent online requests until the most urgent has KV to run (§V-B)."""
    running = [candidate for candidate in online if not candidate.is_new]
    retracted: set[str] = set()
    while running:
        first = running[0]
        needed = batch.memory.kv_to_prefill(first.context_tokens, first.rest_tokens, is_new=False)
        if batch.memory.reclaim(needed):
            break
        request = running.pop().request
        assert request is not None
        batch.memory.retract(request, needed)
        retracted.add(request.info.rid)
    return [candidate for candidate in online if candidate.rid not in retracted]


def _offline(batch: StepBuilder, context: PlanContext) -> Iterator[Candidate]:
    """Yield the offline requests, first those with no KV to restore (line 17)."""
    for admitted in batch.requests.offline_decodes + batch.requests.offline_prefills:
        if not batch.memory.is_retracted(admitted):
            yield Candidate.of_request(admitted, math.inf)
    if batch.admits_offline:
        for request, cached_tokens in islice(context.candidates, context.config.max_picks):
            yield Candidate.of_queued(request, cached_tokens)
