"""First come, first served, without classes: stock SGLang."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from sglang_coserve.core.planning.plan_context import PlanContext
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.policy import Policy

__all__ = ["FcfsPolicy"]


class _Waiting(NamedTuple):
    arrival_s: float
    rid: str
    length_tokens: int
    cached_tokens: int


@dataclass
class FcfsPolicy(Policy):
    """Serves online and offline requests in one queue, by arrival.

    The scheduling that BROS (§II-B) starts from, as in a server without request
    classes: chunked prefill mixed with decodes under a fixed
    token budget, without preemption. If KV runs out, the last admitted request is
    retracted. Needs an offline queue ordered by arrival; a request
    whose deadline is at risk goes before other offline ones, not before online ones.
    """

    name: ClassVar[str] = "fcfs"
    is_preemptive: ClassVar[bool] = False

    chunk_tokens: int = 8192
    """Most tokens of a step, prefill and decode together."""

    def compose(self, batch: StepBuilder, context: PlanContext) -> None:
        """See ``Policy.compose``."""
        batch.limit_tokens(self.chunk_tokens)
        self._decode(batch)
        for prefilling in batch.requests.online_prefills + batch.requests.offline_prefills:
            if not batch.memory.is_retracted(prefilling) and not self._prefill(
                batch,
                prefilling.info.rid,
                prefilling.length_tokens,
                prefilling.computed_tokens,
                is_new=False,
            ):
                return
        headroom_tokens = context.config.headroom_tokens
        num_requests = len(batch.snapshot.admitted)
        for place, request in enumerate(self._by_arrival(context)):
            if place == context.config.max_picks or not self._prefill(
                batch,
                request.rid,
                request.length_tokens,
                request.cached_tokens,
                is_new=True,
                headroom_tokens=batch.memory.headroom_tokens(headroom_tokens, num_requests),
            ):
                return
            num_requests += 1

    def _decode(self, batch: StepBuilder) -> None:
        requests, memory = (
            batch.requests.online_decodes + batch.requests.offline_decodes,
            batch.memory,
        )
        last_first = list(reversed(batch.snapshot.admitted))
        while not memory.has_room(needed := memory.kv_to_decode(requests), requests=len(requests)):
            request = last_first.pop(0)
            memory.retract(request, needed)
            if request in requests:
                requests.remove(request)
        batch.decode(requests)

    def _prefill(
        self,
        batch: StepBuilder,
        rid: str,
        length_tokens: int,
        cached_tokens: int,
        *,
        is_new: bool,
        headroom_tokens: int = 0,
    ) -> bool:
        """Add the longest chunk that fits; return whether it completes the prompt."""
        rest_tokens = max(length_tokens - cached_tokens, 1)
        tokens = batch.longest_chunk(cached_tokens, rest_tokens, math.inf)
        kv_tokens = batch.memory.kv_to_prefill(cached_tokens, rest_tokens, is_new=is_new)
        if tokens == 0 or not batch.memory.has_room(kv_tokens + headroom_tokens, int(is_new)):
            return False
        batch.prefill(rid, tokens, cached_tokens, kv_tokens, is_new=is_new)
        return tokens == rest_tokens

    @staticmethod
    def _by_arrival(context: PlanContext) -> Iterator[_Waiting]:
        online = (
            _Waiting(
                request.info.arrival_s,
                request.info.rid,
                request.length_tokens,
                request.cached_tokens,
            )
            for request in context.waiting
        )
        offline = (
            _Waiting(
                request.arrival_s,
                request.rid,
                request.num_prompt_tokens + request.num_generated_tokens,
                cached_tokens,
            )
            for request, cached_tokens in context.candidates
        )
        return heapq.merge(online, offline, key=lambda request: request.arrival_s)
