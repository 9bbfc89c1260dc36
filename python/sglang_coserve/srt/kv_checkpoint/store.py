"""The store that keeps the KV of offline requests as checkpoints in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from sglang_coserve.core.kv_loads import most_loaded_tokens
from sglang_coserve.srt import compat
from sglang_coserve.srt.kv_store import KvStore
from sglang_coserve.srt.marks.request_marks import is_offline

if TYPE_CHECKING:
    from sglang_coserve.srt.kv_checkpoint.cache import CheckpointCache

Req = Any
ScheduleBatch = Any

COUNTED: Final = (
    *("allocation_failures", "backed_off_steps", "stalled_steps", "late_copies", "refused_loads"),
    *("adopted_tokens", "demoted_tokens", "dropped_tokens", "splits", "host_evicted_tokens"),
    *("prefetch_issued_tokens", "prefetch_published_tokens", "prefetch_discarded_tokens"),
)
"""Counts of the cache, which only grow."""

_WAIT_S: Final = 10.0
"""Longest time that a request is held back."""


class CheckpointStore(KvStore):
    """Saves KV as the cache's strategy says, and holds requests back while their KV is loaded."""

    def __init__(self, cache: CheckpointCache) -> None:
        self._cache = cache
        self._wanted: dict[str, Req] = {}
        self._no_room: set[str] = set()
        self._held_since_s: dict[str, float] = {}
        self._now_s = 0.0

    def computed(self, batch: ScheduleBatch) -> None:
        """Begin the copies of a step."""
        self._cache.checkpoint_step(_progress(batch))

    def begin_pass(self, now_s: float) -> None:
        """Begin to load the KV on the host of requests that were held back in the last pass."""
        self._now_s = now_s
        self._cache.begin_pass(now_s)
        most = most_loaded_tokens(self._cache.token_to_kv_pool_allocator.size)
        budget = most - self._cache.prefetches.in_flight_tokens
        self._no_room.clear()
        for rid, req in self._wanted.items():
            tokens = self._cache.prefetch_step(req, budget)
            if tokens is None:
                self._no_room.add(rid)
            else:
                budget -= tokens
            self._cache.need(req)
        self._wanted.clear()

    def wants(self, req: Req) -> bool:
        """Hold a request back until its KV is on the device, or loading takes too long.

        SGLang then loads the KV with the batch, or computes it again.
        """
        return self._waits(req, self._held_since_s.pop(req.rid, self._now_s))

    def loaded(self, req: Req) -> bool:
        """Return whether a request is not held back, or no longer."""
        since_s = self._held_since_s.get(req.rid)
        return since_s is None or not self._waits(req, since_s)

    def _waits(self, req: Req, since_s: float) -> bool:
        """Return whether a request, held back since ``since_s``, waits on for its load; note it."""
        loads = self._cache.prefetches
        req.init_next_round_input(self._cache)
        if not req.host_hit_length or loads.is_stuck or self._now_s - since_s >= _WAIT_S:
            return False
        # A batch would wait for loads in flight anyway, and these may make room.
        if req.rid in self._no_room and not loads.in_flight_tokens:
            return False
        self._held_since_s[req.rid] = since_s
        self._wanted[req.rid] = req
        self._cache.need(req)
        return True

    def forget(self, rid: str) -> None:
        """Drop all state of a request, the protection of its host pages included."""
        self._wanted.pop(rid, None)
        self._held_since_s.pop(rid, None)
        self._cache.forget(rid)

    def figures(self) -> dict[str, Any]:
        """Return what ``/coserve/status`` says of checkpoints (docs/kv_checkpoint.md). O(1)."""
        cache = self._cache
        checkpointed = cache.counts["checkpointed_tokens"]
        return {
            "mode": cache.strategy.name,
            "checkpointed_tokens": checkpointed,
            "checkpointed_bytes": checkpointed * cache.host_pool.size_per_token,
            "lag_tokens": cache.copies.in_flight_tokens,
            "host_tokens": cache.space.used_tokens,
            "host_limit_tokens": cache.space.limit_tokens,
            **{name: cache.counts[name] for name in COUNTED},
        }


def _progress(batch: ScheduleBatch) -> Iterator[tuple[Req, int]]:
    """Yield the offline requests of a processed batch, each with the length of its computed KV.

    All tokens except the last have KV; SGLang's own length may include a token in flight under
    overlap scheduling. The length is 0 for an unfinished prompt, whose chunks go to the tree, and
    are saved as a prefix.
    """
    is_extend = batch.forward_mode.is_extend()
    for place, req in enumerate(batch.reqs):
        if not is_offline(req) or not compat.holds_kv(req) or req.finished():
            continue
        computed = len(req.origin_input_ids) + len(req.output_ids) - 1
        if is_extend and batch.prefix_lens[place] + batch.extend_lens[place] < computed:
            computed = 0
        yield req, computed
