"""Loads host KV to the device in the background, before the request that resumes is admitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.unified_radix_cache import _OngoingLoadBack

from sglang_coserve.srt import compat
from sglang_coserve.srt.kv_checkpoint.checkpoint_tree import host_slots, path_to
from sglang_coserve.srt.kv_checkpoint.reclaim import Reclaimer

__all__ = ["Prefetches"]

Node = Any
Req = Any


@dataclass(frozen=True, slots=True)
class _Load:
    rid: str
    node: Node
    device_slots: torch.Tensor
    begun_s: float
    ancestor_id: int
    """Id of the last node that the request has on the device, locked meanwhile."""
    lock: Any


class Prefetches:
    """Loads nodes, top first, into free slots; a node gets them only when its load is complete.

    SGLang itself loads KV within the prefill batch of the request, whose
    other requests then wait for the transfer.
    """

    timeout_s = 5.0
    """A load that takes longer counts as stuck: no more loads are begun."""

    def __init__(self, cache: Any, reclaimer: Reclaimer, counts: Counter[str]) -> None:
        self._cache = cache
        self._reclaimer = reclaimer
        self._counts = counts
        self._loads: dict[int, _Load] = {}
        self.in_flight_tokens = 0
        self.now_s = 0.0
        """Beginning of this scheduling round, on the clock that all ranks share."""

    @property
    def is_stuck(self) -> bool:
        """True if the oldest load in flight exceeds ``timeout_s``."""
        oldest_s = next((load.begun_s for load in self._loads.values()), self.now_s)
        return self.now_s - oldest_s > self.timeout_s

    def step(self, req: Req, budget_tokens: int) -> int | None:
        """Begin the next loads of a waiting request that was just matched with the tree.

        Returns the number of their tokens, at most ``budget_tokens``; 0 if there is nothing to
        load now, None if the device has no room.
        """
        if not req.host_hit_length or self.is_stuck:
            return 0
        if any(load.rid == req.rid for load in self._loads.values()):
            return 0
        # Making room on the device may evict host pages; pinning its end protects the path.
        tree = self._cache.tree_core
        top, end = tree.node_by_id(req.last_node), tree.node_by_id(req.best_match_node)
        tree.pin(end)
        tokens = self._begin_path(req, path_to(end, top), budget_tokens)
        tree.unpin(end)
        return tokens

    def _begin_path(self, req: Req, path: Sequence[Node], budget_tokens: int) -> int | None:
        """Begin to load nodes, top first, within the budget and the room (see ``step``)."""
        cache, ancestor_id = self._cache, req.last_node
        loading = {load.node.id for load in self._loads.values()}
        begun = 0
        for node in path:
            left = (budget_tokens - begun) // cache.page_size * cache.page_size
            # Or the node is being loaded for another request with the same prefix.
            if left <= 0 or node.id in loading:
                break
            tokens = min(len(node.key), left)
            device_slots = self._allocate(tokens, ancestor_id)
            if device_slots is None:
                return begun or None
            if tokens < len(node.key):
                node = cache.tree_core.split(node, tokens)
            lock = cache.inc_lock_ref(ancestor_id).to_dec_params()
            self._begin(_Load(req.rid, node, device_slots, self.now_s, ancestor_id, lock))
            begun += tokens
        return begun

    def _allocate(self, tokens: int, ancestor_id: int) -> torch.Tensor | None:
        allocator = self._cache.token_to_kv_pool_allocator
        shortage = tokens - allocator.available_size()
        if shortage > 0:
            lock = self._cache.inc_lock_ref(ancestor_id).to_dec_params()
            self._reclaimer.reclaim(shortage, for_prefetch=True)
            self._cache.dec_lock_ref(ancestor_id, lock)
        slots: torch.Tensor | None = allocator.alloc(tokens)
        return slots

    def _begin(self, load: _Load) -> None:
        cache, tokens = self._cache, len(load.device_slots)
        load_id = -1 - self._counts["prefetches"]
        self._counts["prefetches"] += 1
        self._counts["prefetch_issued_tokens"] += tokens
        cache.tree_core.pin(load.node)
        # An entry for SGLang, which sees the load end on all ranks alike; it only locks the root.
        root_id = cache.root_node.id
        nothing = cache.inc_lock_ref(root_id).to_dec_params()
        nothing_on_host = cache.inc_host_lock_ref(root_id).to_dec_params()
        cache.ongoing_load_back[load_id] = _OngoingLoadBack(root_id, nothing, nothing_on_host)
        self._loads[load_id] = load
        self.in_flight_tokens += tokens
        self._copy(load, load_id)

    def _copy(self, load: _Load, load_id: int) -> None:
        slots = host_slots(load.node)
        compat.start_load(self._cache.cache_controller, slots, load.device_slots, load_id)

    def settle(self) -> None:
        """Assign the loaded slots to nodes whose loads SGLang has seen end. O(loads)."""
        ongoing = self._cache.ongoing_load_back
        for load_id in [load_id for load_id in self._loads if load_id not in ongoing]:
            load = self._loads.pop(load_id)
            self.in_flight_tokens -= len(load.device_slots)
            self._cache.dec_lock_ref(load.ancestor_id, load.lock)
            self._cache.tree_core.unpin(load.node)
            self._publish(load.node, load.device_slots)

    def _publish(self, node: Node, device_slots: torch.Tensor) -> None:
        cache = self._cache
        # The node may have been split meanwhile, or got KV from a request with the same prefix.
        is_wanted = node.evicted and len(node.key) == len(device_slots)
        if not is_wanted or host_slots(node) is None or node.parent.evicted:
            self._counts["prefetch_discarded_tokens"] += len(device_slots)
            cache.token_to_kv_pool_allocator.free(device_slots)
            return
        cache.tree_core.put_on_device(node, device_slots)
        cache.tree_core.eviction_strategy.needed.add(node.id)
        self._counts["prefetch_published_tokens"] += len(device_slots)
