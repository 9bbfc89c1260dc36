"""Snapshots of the engine: the state of SGLang's scheduler as an immutable value of the core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import EngineSnapshot, Request
from sglang_coserve.srt.compat import cached_prefix_tokens, computed_tokens, prefix_tokens
from sglang_coserve.srt.steps.clocks import RankTime
from sglang_coserve.srt.steps.engine_queues import EngineQueues
from sglang_coserve.srt.steps.engine_requests import EngineRequests
from sglang_coserve.srt.steps.kv_pools import KvPools
from sglang_coserve.srt.steps.offline_lane import OfflineLane

Req = Any
ScheduleBatch = Any

_MATCHED_WAITING: Final = 8
"""Number of waiting online requests whose cached prefix is looked up in each round; the others
count as not cached."""

_RESUME_S: Final = 1.6e-3
"""The cost of suspending and resuming a step, in seconds, until one has shown it: the median on a
CPU (tag ``measurements-1``)."""


class Snapshots:
    """Makes snapshots from the owners of the requests: ``EngineRequests`` knows every request,
    ``EngineQueues`` its place, and ``OfflineLane`` has the suspended step."""

    def __init__(
        self,
        scheduler: Any,
        requests: EngineRequests,
        queues: EngineQueues,
        pools: KvPools,
        lane: OfflineLane,
        *,
        keeps_prefixes: bool,
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._queues = queues
        self._pools = pools
        self._lane = lane
        self._keeps_prefixes = keeps_prefixes

    def take(self, running_batch: ScheduleBatch, time: RankTime) -> EngineSnapshot:
        """Return the state of SGLang's scheduler. O(requests + waiting online requests)."""
        scheduler, pools, queues = self._scheduler, self._pools, self._queues
        safepoints = self._lane.safepoints
        admitted = self._admitted(running_batch)
        num_held = len(admitted) + len(queues.suspended)
        return EngineSnapshot(
            now_s=time.now_s,
            admitted=admitted,
            waiting=WaitingRequests(self._requests, queues.waiting_in_turn, self.match_prefix),
            free_kv_tokens=pools.free_tokens,
            evictable_kv_tokens=pools.evictable_tokens,
            free_slots=max(0, scheduler.get_num_allocatable_reqs(num_held)),
            max_batch_tokens=scheduler.chunked_prefill_size or scheduler.max_prefill_tokens,
            chunk_rules=queues.chunk_rules,
            page_tokens=scheduler.page_size,
            keeps_prefixes=self._keeps_prefixes,
            window_tokens=pools.window_tokens,
            free_window_tokens=pools.free_window_tokens,
            elsewhere=tuple(self._decoding(queues.elsewhere(), RequestState.DECODING)),
            suspended=self._lane.seen(),
            stop_share=safepoints.stop_share,
            decodes_stop=safepoints.decodes_stop,
            resume_s=_RESUME_S,
            ahead_s=time.ahead_s,
        )

    def match_prefix(self, req: Req) -> int:
        """Return how many leading tokens of a waiting request the radix cache holds."""
        return cached_prefix_tokens(self._scheduler.tree_cache, req)

    def _admitted(self, running_batch: ScheduleBatch) -> list[Request]:
        queues = self._queues
        paused = queues.paused_requests
        admitted = self._decoding(running_batch.reqs, RequestState.DECODING)
        admitted += self._decoding(paused.paused, RequestState.PAUSED)
        admitted += [self._prefilling(req, RequestState.PARKED) for req in paused.parked]
        if queues.chunk is not None:
            admitted.append(self._prefilling(queues.chunk, RequestState.PREFILLING))
        return admitted

    def _decoding(self, reqs: Iterable[Req], state: RequestState) -> list[Request]:
        return decoding_requests(self._requests, reqs, state)

    def _prefilling(self, req: Req, state: RequestState) -> Request:
        """Return a request whose prompt is partly computed as a snapshot has it."""
        live = self._requests[req.rid]
        times_s = live.last_token_s, live.first_token_s
        return Request(live.info, state, len(req.output_ids), prefix_tokens(req), 0, *times_s)


class WaitingRequests(Sequence[Request]):
    """Waiting requests as a snapshot has them, the first with their cached prefix.

    Each is described when it is first asked for: a plan asks for few of many.
    """

    def __init__(
        self, known: EngineRequests, reqs: Iterable[Req], match_prefix: Callable[[Req], int]
    ) -> None:
        """``match_prefix`` returns how many leading tokens of a request are cached."""
        self._known = known
        self._reqs = list(reqs)
        self._match_prefix = match_prefix
        self._first: list[Request] = []
        """The first requests, as they were described."""

    def __len__(self) -> int:
        return len(self._reqs)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        first = self._first
        while len(first) <= place:
            first.append(self._describe(len(first)))
        return first[place]

    def _describe(self, place: int) -> Request:
        req = self._reqs[place]
        cached = self._match_prefix(req) if place < _MATCHED_WAITING else 0
        live, generated = self._known[req.rid], len(req.output_ids)
        times_s = live.last_token_s, live.first_token_s
        return Request(live.info, RequestState.WAITING, generated, 0, cached, *times_s)


def decoding_requests(
    known: EngineRequests, reqs: Iterable[Req], state: RequestState
) -> list[Request]:
    """Return requests that decode, or are paused, as a snapshot has them. O(requests)."""
    lives, new = known.by_rid, tuple.__new__  # What Request() does, at half its cost.
    requests = []
    for req in reqs:
        live = lives[req.rid]
        info = live.info
        # Includes a token in flight under overlap scheduling, as its KV is allocated already.
        computed = computed_tokens(req)
        generated = computed + 1 - info.prompt_tokens
        last_s = None if generated > len(req.output_ids) else live.last_token_s
        row = (info, state, generated, computed, 0, last_s, live.first_token_s)
        requests.append(new(Request, row))
    return requests
