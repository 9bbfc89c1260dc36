"""Reclaims memory from the radix tree, device pages from the end; loads host KV back to the device.

Loads run in the background, before the request that resumes is admitted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from sglang.srt.mem_cache.unified_radix_cache import _OngoingLoadBack

from sglang_coserve.srt import compat
from sglang_coserve.srt.kv_checkpoint.checkpoint_copies import PendingCopy
from sglang_coserve.srt.kv_checkpoint.checkpoint_tree import (
    device_slots,
    host_slots,
    is_offline_node,
    path_to,
)

Node = Any

_LAZY_TIMEOUT_S: Final = 1.0
"""Longest time that online work waits for copies of what is reclaimed (``Lazy``)."""

_UNDER_WAY_TIMEOUT_S: Final = 0.02
"""Longest wait if all that can be reclaimed is already being copied, e.g. a prompt chunk that was
just computed. Mostly a few ms, which is cheaper than computing the chunk again."""


def reclaim_tokens(wanted_tokens: int, least_tokens: int, page_tokens: int) -> int:
    """Return how many tokens to reclaim, in whole pages, when ``wanted_tokens`` are needed."""
    return -(-max(wanted_tokens, least_tokens) // page_tokens) * page_tokens


class Reclaimer:
    """Frees memory of nodes that no running request uses, offline and least recently used first."""

    least_tokens = 128
    """Fewest tokens to reclaim at a time, so that not every step reclaims a few."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._staged: dict[int, Node] = {}

    # --- Device --------------------------------------------------------------------------

    def reclaim(self, tokens: int, *, for_prefetch: bool = False) -> int:
        """Free at least ``tokens`` device slots if possible; return how many were freed.

        A node is split so that its beginning stays. Offline nodes are reclaimed in larger units
        than requested, online ones never. A prefetch spares nodes from which
        requests about to be admitted resume, and nodes being copied. O(leaves + freed).
        """
        cache, tree = self._cache, self._cache.tree_core
        order = tree.eviction_strategy
        wanted = reclaim_tokens(tokens, self.least_tokens, cache.page_size)
        least = reclaim_tokens(tokens, 0, cache.page_size)
        heap = [(order.get_priority(node), node) for node in tree.evictable_device_leaves]
        heapq.heapify(heap)
        freed: list[torch.Tensor] = []
        num_freed = 0
        while heap:
            _, node = heapq.heappop(heap)
            limit = wanted if is_offline_node(node) else least
            is_copying = self._cache.copies.is_copying(node)
            if num_freed >= limit:
                break
            if for_prefetch and (is_copying or order.is_needed(node)):
                continue
            if is_copying and not self._cache.copies.is_late:
                self._cache.copies.finish_all(_UNDER_WAY_TIMEOUT_S)
            surplus = len(device_slots(node)) - (limit - num_freed)
            if surplus > 0:
                tree.split(node, surplus)
                self._cache.counts["splits"] += 1
            freed.append(self._take(node))
            num_freed += len(freed[-1])
            if node.parent in tree.evictable_device_leaves:
                heapq.heappush(heap, (order.get_priority(node.parent), node.parent))
        self._finish()
        if freed:
            # The slots are whole pages in order: ``free`` would wait for the device to find them.
            cache.token_to_kv_pool_allocator.free_segment(torch.cat(freed), start_pos=0)
        return num_freed

    def _take(self, node: Node) -> torch.Tensor:
        """Remove a leaf's device slots, which the caller frees; keep the node if it is saved."""
        tree = self._cache.tree_core
        if host_slots(node) is None and self._is_saved_late(node):
            tree.pin(node)
            self._staged[node.id] = node
        if host_slots(node) is not None:
            slots: torch.Tensor = tree.take_device_slots(node)
            self._cache.counts["demoted_tokens"] += len(slots)
            return slots
        for child in list(node.children.values()):
            tree.drop(child, self._free)
        slots = tree.take_device_slots(node)
        if is_offline_node(node):
            self._cache.counts["dropped_tokens"] += len(slots)
        return slots

    # --- Lazy copies ---------------------------------------------------------------------

    def _is_saved_late(self, node: Node) -> bool:
        """Begin to copy a node before its device slots are freed (``Lazy``), if possible."""
        cache, tokens = self._cache, len(device_slots(node))
        if not cache.strategy.saves_on_reclaim:
            return False
        # Save an online node only if it has children on the host, which are useless without it.
        if not is_offline_node(node) and not node.children:
            return False
        if self._cache.copies.is_late:
            return False
        if not self._cache.copies.may_begin(cache.step):
            return False
        self.reclaim_host(tokens)
        slots = self._cache.space.alloc(tokens, cache.step)
        if slots is None:
            return False
        cache.tree_core.bind_host(node, slots)
        self._cache.copies.begin([PendingCopy(node, slots)], device_slots(node), slots, cache.step)
        self._cache.counts["checkpointed_tokens"] += tokens
        return True

    def _finish(self) -> None:
        """Wait for the copies of staged nodes; drop the nodes if these time out."""
        if not self._staged:
            return
        tree = self._cache.tree_core
        is_late = not self._cache.copies.finish_all(_LAZY_TIMEOUT_S)
        for node in list(self._staged.values()):
            tree.unpin(node)
            if is_late and node.id in self._staged:
                self._cache.counts["late_copies"] += 1
                tree.drop(node, self._free)
        self._staged.clear()

    # --- Host ----------------------------------------------------------------------------

    def reclaim_host(self, tokens: int) -> None:
        """Free host pages until ``tokens`` can be allocated, if they ever can.

        Only nodes that are on the host only, least recently used first, except those from which a
        waiting request resumes. O(host leaves).
        """
        tree, space = self._cache.tree_core, self._cache.space
        shortage = tokens - space.free_tokens
        if shortage <= 0 or tokens > space.limit_tokens:
            return
        heap = [(node.last_access_time, node) for node in tree.evictable_host_leaves]
        heapq.heapify(heap)
        freed = 0
        while freed < shortage and heap:
            _, node = heapq.heappop(heap)
            freed += len(host_slots(node))
            parent = node.parent
            tree.drop(node, self._free)
            if parent in tree.evictable_host_leaves:
                heapq.heappush(heap, (parent.last_access_time, parent))
        self._cache.counts["host_evicted_tokens"] += freed

    def _free(self, node: Node) -> None:
        """Free a node's host slots; those of a staged node are freed when its copy ends."""
        if self._staged.pop(node.id, None) is None:
            self._cache.space.free(host_slots(node))


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

    def __init__(self, cache: Any) -> None:
        self._cache = cache
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
            self._cache.reclaimer.reclaim(shortage, for_prefetch=True)
            self._cache.dec_lock_ref(ancestor_id, lock)
        slots: torch.Tensor | None = allocator.alloc(tokens)
        return slots

    def _begin(self, load: _Load) -> None:
        cache, tokens = self._cache, len(load.device_slots)
        load_id = -1 - self._cache.counts["prefetches"]
        self._cache.counts["prefetches"] += 1
        self._cache.counts["prefetch_issued_tokens"] += tokens
        cache.tree_core.pin(load.node)
        # An entry for SGLang, which sees the load end on all ranks alike; it only locks the root.
        root_id = cache.root_node.id
        nothing = cache.inc_lock_ref(root_id).to_dec_params()
        nothing_on_host = cache.inc_host_lock_ref(root_id).to_dec_params()
        cache.ongoing_load_back[load_id] = _OngoingLoadBack(root_id, nothing, nothing_on_host)
        self._loads[load_id] = load
        self.in_flight_tokens += tokens
        slots = host_slots(load.node)
        compat.start_load(cache.cache_controller, slots, load.device_slots, load_id)

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
            self._cache.counts["prefetch_discarded_tokens"] += len(device_slots)
            cache.token_to_kv_pool_allocator.free_segment(device_slots, start_pos=0)
            return
        cache.tree_core.put_on_device(node, device_slots)
        cache.tree_core.eviction_strategy.needed.add(node.id)
        self._cache.counts["prefetch_published_tokens"] += len(device_slots)
