"""Two engines that share the work by latency: OOCO's relaxed and strict pools (§3.2)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.migration import preferred_length, requests_to_pull
from sglang_coserve.core.request import RequestState
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.request import SimRequest

Pull = Callable[["Pools"], list[str]]
"""Returns the decoding requests of the relaxed engine that the strict one takes over now."""


class Pools:
    """A relaxed engine that prefills, and a strict one that decodes.

    All requests arrive at the relaxed engine. Online ones move to the strict one
    after their first token (pushed), offline ones when ``pull`` selects them. A request
    that the strict engine retracts waits at the relaxed one again. A request in transfer,
    at ``link_tokens_per_s``, is at neither. Without room it stays where it is.
    """

    def __init__(
        self, relaxed: SimEngine, strict: SimEngine, link_tokens_per_s: float, pull: Pull
    ) -> None:
        """``strict`` must have been created with ``take_back=relaxed.accept``."""
        self.relaxed, self.strict = relaxed, strict
        self._link_tokens_per_s = link_tokens_per_s
        self._pull = pull
        self._on_their_way: list[tuple[float, int, SimRequest, int]] = []
        self.coming_tokens = 0
        """Of requests in transfer."""

        self._num_moved = 0

    def step(self, end_s: float) -> bool:
        """Advance the engine that is behind; return False if both are done before ``end_s``."""
        relaxed, strict = self.relaxed, self.strict
        if relaxed.now_s <= strict.now_s:
            if relaxed.now_s < end_s and relaxed.step(end_s):
                self._push()
                return True
            if strict.now_s > relaxed.now_s:
                relaxed.now_s = strict.now_s
                return True
            # Both are at the same time, and only the strict engine may have work.
        self._deliver()
        if strict.now_s < end_s and strict.step(end_s):
            for rid in self._pull(self):
                self._move(rid)
            return True
        next_s = self._on_their_way[0][0] if self._on_their_way else math.inf
        if relaxed.now_s > strict.now_s:
            next_s = min(next_s, relaxed.now_s)
        if not next_s < end_s:
            return False
        strict.now_s = next_s
        return True

    def _push(self) -> None:
        for rid, request in list(self.relaxed.executor.admitted.items()):
            if request.info.is_online and request.state is RequestState.DECODING:
                self._move(rid)

    def _move(self, rid: str) -> None:
        kv_tokens = self.relaxed.executor.admitted[rid].computed_tokens
        if not self.strict.executor.has_room_for(kv_tokens + self.coming_tokens):
            return
        request, kv_tokens = self.relaxed.executor.hand_over(rid)
        self.relaxed.forget(request)
        ready_s = self.relaxed.now_s + kv_tokens / self._link_tokens_per_s
        heapq.heappush(self._on_their_way, (ready_s, self._num_moved, request, kv_tokens))
        self.coming_tokens += kv_tokens
        self._num_moved += 1

    def _deliver(self) -> None:
        """Add transferred requests to the strict engine; return those for which it lacks room."""
        while self._on_their_way and self._on_their_way[0][0] <= self.strict.now_s:
            _, _, request, kv_tokens = heapq.heappop(self._on_their_way)
            self.coming_tokens -= kv_tokens
            if self.strict.executor.has_room_for(kv_tokens):
                self.strict.executor.adopt(request, kv_tokens)
            else:
                self.relaxed.accept(request)


def length_preference(model: LatencyModel, tpot_s: float) -> Pull:
    """Return a pull function by OOCO's Algorithm 1: offline requests of the preferred length."""

    def pull(pools: Pools) -> list[str]:
        strict = pools.strict.executor
        is_whole = all(
            request.state is RequestState.DECODING for request in strict.admitted.values()
        )
        room_tokens = strict.kv.free_pages * strict.kv.page_tokens
        preference = preferred_length(
            model,
            pools.strict.last_plan.batch,
            tpot_s,
            room_tokens,
            includes_all=is_whole,
        )
        if preference is None:
            return []
        relaxed = pools.relaxed.executor
        away = relaxed.suspended.requests if relaxed.suspended else ()
        lengths = {
            rid: request.computed_tokens
            for rid, request in relaxed.admitted.items()
            if request.has_prompt and not request.info.is_online and request not in away
        }
        return requests_to_pull(
            lengths, *preference, most=len(lengths), coming_tokens=pools.coming_tokens
        )

    return pull
