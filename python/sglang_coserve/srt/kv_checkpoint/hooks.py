"""The calls that a scheduler makes for KV checkpoints; they do nothing when these are off.

1. ``processed`` after the results of each batch.
2. ``prefetch`` at the beginning of a scheduling round, before any request is matched.
3. ``is_held_back`` with the waiting requests that may be planned; ``hold_back`` with those that are
   about to be admitted.
4. ``forget`` when a request has ended or is aborted.

Releasing a request, reclaiming and resuming need no call, because SGLang does these through
the cache. Tokens that are computed twice, the tax of retraction, are counted with checkpoints
and without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from sglang_coserve.core.kv_checkpoint import most_loaded_tokens
from sglang_coserve.core.request import RequestClass
from sglang_coserve.srt import compat
from sglang_coserve.srt.forward_kind import prefilled
from sglang_coserve.srt.marks.offline_marks import leaves_with

if TYPE_CHECKING:
    from sglang_coserve.srt.kv_checkpoint.cache import CheckpointCache

Req = Any
ScheduleBatch = Any

COUNTED: Final = (
    *("allocation_failures", "backed_off_steps", "stalled_steps", "late_copies", "refused_loads"),
    *("adopted_tokens", "demoted_tokens", "dropped_tokens", "splits", "host_evicted_tokens"),
    *("prefetch_issued_tokens", "prefetch_published_tokens", "prefetch_discarded_tokens"),
    *("moved_out_tokens", "moved_in_tokens", "moves_without_kv"),
)
"""What the cache counts, and only ever grows."""

_ALL: Final = -1
"""Value for a request of which all tokens except the last have been computed."""


class RecomputeMeter:
    """Counts the tokens that batches compute, and those that had been computed before.

    Runs whether KV is checkpointed or not, as it shows whether that is worthwhile. To be cheap,
    it only counts decodes, which compute nothing twice.
    """

    def __init__(self) -> None:
        self._computed_to: dict[str, int] = {}
        self.computed_tokens: Counter[RequestClass] = Counter()
        self.recomputed_tokens: Counter[RequestClass] = Counter()

    def ran(self, batch: ScheduleBatch, offline: Sequence[bool]) -> None:
        """Count a batch whose results are in; ``offline`` says which requests are offline."""
        num_prefills = 0
        if batch.forward_mode.is_extend():
            prefills = prefilled(batch)
            num_prefills = len(prefills)
            lens = zip(batch.prefix_lens, batch.extend_lens, strict=True)
            for req, is_offline, (begin, tokens) in zip(prefills, offline, lens, strict=False):
                self._prefilled(req, is_offline, begin, tokens)
        num_offline = sum(offline[num_prefills:])
        self.computed_tokens[RequestClass.OFFLINE] += num_offline
        self.computed_tokens[RequestClass.ONLINE] += len(offline) - num_prefills - num_offline

    def _prefilled(self, req: Req, offline: bool, begin: int, tokens: int) -> None:
        """Count a request that has computed ``tokens`` tokens after the first ``begin``."""
        end = begin + tokens
        is_whole = end >= len(req.origin_input_ids) + len(req.output_ids) - 1
        before = self._computed_to.get(req.rid, 0)
        if before == _ALL:
            # If the request is complete now, its last token was not computed before.
            before = end - is_whole
        elif not req.finished():
            # Tokens found in the cache count as computed at this point. One that was aborted
            # between two chunks may be forgotten already.
            self._computed_to[req.rid] = _ALL if is_whole else max(before, end)
        request_class = RequestClass.OFFLINE if offline else RequestClass.ONLINE
        self.computed_tokens[request_class] += tokens
        self.recomputed_tokens[request_class] += max(0, min(before, end) - begin)

    def forget(self, rid: str) -> None:
        """Drop a request that has ended."""
        self._computed_to.pop(rid, None)

    def tax(self, request_class: RequestClass) -> float:
        """Return the share of the computed tokens that had been computed before."""
        computed = self.computed_tokens[request_class]
        return self.recomputed_tokens[request_class] / computed if computed else 0.0


_WAIT_S: Final = 10.0
"""Longest time that a request is held back."""


class KvCheckpointing:
    """A scheduler's interface to KV checkpoints; see the module's docstring."""

    def __init__(self, tree_cache: Any) -> None:
        # By attribute, so that SGLang's hierarchical cache need not be imported when off.
        is_ours = hasattr(tree_cache, "checkpoint_step")
        self._cache: CheckpointCache | None = tree_cache if is_ours else None
        self._meter = RecomputeMeter()
        self._wanted: dict[str, Req] = {}
        self._no_room: set[str] = set()
        self._held_since_s: dict[str, float] = {}
        self._now_s = 0.0

    def processed(self, batch: ScheduleBatch, offline: Sequence[bool]) -> None:
        """Save the KV that a batch has computed; to be called after its results are processed.

        ``offline`` says which of its requests are offline.
        """
        self._meter.ran(batch, offline)
        if self._cache is not None:
            self._cache.checkpoint_step(_progress(batch, offline))

    def prefetch(self, now_s: float) -> None:
        """Begin to load the host KV of the requests that were held back in the last round.

        This may evict cache entries, so it must not be called between a plan and its
        execution. ``now_s`` is on the clock that all ranks share.
        """
        if self._cache is None:
            return
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

    def hold_back(self, reqs: Iterable[Req]) -> set[str]:
        """Return the ids of those waiting requests to admit later, once their KV is loaded.

        A request is no longer held back when its KV is on the device, or when loading takes too
        long: SGLang then loads it with the batch, or computes it again.
        """
        if self._cache is None:
            return set()
        return {
            req.rid
            for req in reqs
            if self._waits(req, self._held_since_s.pop(req.rid, self._now_s))
        }

    def is_held_back(self, req: Req) -> bool:
        """Return whether a waiting request that was held back before still is."""
        since_s = self._held_since_s.get(req.rid)
        return since_s is not None and self._waits(req, since_s)

    def _waits(self, req: Req, since_s: float) -> bool:
        """Return whether a request, held back since ``since_s``, waits on for its load; note it."""
        assert self._cache is not None
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
        """Remove all state of a request, if there is any."""
        self._meter.forget(rid)
        self._wanted.pop(rid, None)
        self._held_since_s.pop(rid, None)
        if self._cache is not None:
            self._cache.forget(rid)

    def state(self) -> dict[str, Any]:
        """Return what ``/coserve/status`` says of them (docs/kv_checkpoint.md). O(1)."""
        cache, meter = self._cache, self._meter
        counts = cache.counts if cache is not None else {}
        bytes_per_token = cache.host_pool.size_per_token if cache is not None else 0
        checkpointed = counts.get("checkpointed_tokens", 0)
        return {
            "mode": cache.policy.mode.value if cache is not None else "off",
            "checkpointed_tokens": checkpointed,
            "checkpointed_bytes": checkpointed * bytes_per_token,
            "lag_tokens": cache.copies.in_flight_tokens if cache is not None else 0,
            "host_tokens": cache.space.used_tokens if cache is not None else 0,
            "host_limit_tokens": cache.space.limit_tokens if cache is not None else 0,
            "classes": {
                request_class.value: {
                    "computed_tokens": meter.computed_tokens[request_class],
                    "recomputed_tokens": meter.recomputed_tokens[request_class],
                    "recompute_tax": meter.tax(request_class),
                }
                for request_class in RequestClass
            },
            **{name: counts.get(name, 0) for name in COUNTED},
        }


def _progress(batch: ScheduleBatch, offline: Sequence[bool]) -> Iterator[tuple[Req, int]]:
    """Yield the offline requests of a processed batch, each with the length of its computed KV, and
    the online ones that are to leave.

    That is all tokens except the last; SGLang's own length may include a token in flight under
    overlap scheduling. It is 0 for an unfinished prompt, whose chunks
    go to the tree, and are saved as a prefix.
    """
    is_extend = batch.forward_mode.is_extend()
    for place, req in enumerate(batch.reqs):
        if not offline[place] and leaves_with(req) is None:
            continue
        if not compat.holds_kv(req) or req.finished():
            continue
        computed = len(req.origin_input_ids) + len(req.output_ids) - 1
        if is_extend and batch.prefix_lens[place] + batch.extend_lens[place] < computed:
            computed = 0
        yield req, computed
