"""Reclaims memory from the radix tree: device pages from the end, host pages as needed."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any, Final

import torch

from sglang_coserve.core.kv_checkpoint import CheckpointMode, CheckpointPolicy, reclaim_tokens
from sglang_coserve.srt.kv_checkpoint.checkpoint_tree import (
    device_slots,
    host_slots,
    is_offline_node,
)
from sglang_coserve.srt.kv_checkpoint.copy_jobs import CopyJobs, PendingCopy
from sglang_coserve.srt.kv_checkpoint.request_checkpoint import HostSpace

__all__ = ["Reclaimer"]

Node = Any

_LAZY_TIMEOUT_S: Final = 1.0
"""Longest time that online work waits for copies of what is reclaimed (``LAZY``)."""

_UNDER_WAY_TIMEOUT_S: Final = 0.02
"""Longest wait if all that can be reclaimed is already being copied, e.g. a prompt chunk that was
just computed. Mostly a few ms, which is cheaper than computing the chunk again."""


class Reclaimer:
    """Frees memory of nodes that no running request uses, offline and least recently used first."""

    def __init__(
        self,
        cache: Any,
        policy: CheckpointPolicy,
        space: HostSpace,
        copies: CopyJobs,
        counts: Counter[str],
    ) -> None:
        self._cache = cache
        self._policy = policy
        self._space = space
        self._copies = copies
        self._counts = counts
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
        wanted = reclaim_tokens(tokens, self._policy.reclaim_tokens, cache.page_size)
        least = reclaim_tokens(tokens, 0, cache.page_size)
        heap = [(order.get_priority(node), node) for node in tree.evictable_device_leaves]
        heapq.heapify(heap)
        freed: list[torch.Tensor] = []
        num_freed = 0
        while heap:
            _, node = heapq.heappop(heap)
            limit = wanted if is_offline_node(node) else least
            is_copying = self._copies.is_copying(node)
            if num_freed >= limit:
                break
            if for_prefetch and (is_copying or order.is_needed(node)):
                continue
            if is_copying and not self._copies.is_late:
                self._copies.finish_all(_UNDER_WAY_TIMEOUT_S)
            surplus = len(device_slots(node)) - (limit - num_freed)
            if surplus > 0:
                tree.split(node, surplus)
                self._counts["splits"] += 1
            freed.append(self._take(node))
            num_freed += len(freed[-1])
            if node.parent in tree.evictable_device_leaves:
                heapq.heappush(heap, (order.get_priority(node.parent), node.parent))
        self._finish()
        if freed:
            # The slots are whole pages in order, which ``free_segment`` frees fastest.
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
            self._counts["demoted_tokens"] += len(slots)
            return slots
        for child in list(node.children.values()):
            tree.drop(child, self._free)
        slots = tree.take_device_slots(node)
        if is_offline_node(node):
            self._counts["dropped_tokens"] += len(slots)
        return slots

    # --- Lazy copies ---------------------------------------------------------------------

    def _is_saved_late(self, node: Node) -> bool:
        """Begin to copy a node before its device slots are freed (``LAZY``), if possible."""
        cache, tokens = self._cache, len(device_slots(node))
        if self._policy.mode is not CheckpointMode.LAZY:
            return False
        # Save an online node only if it has children on the host, which are useless without it.
        if not is_offline_node(node) and not node.children:
            return False
        if self._copies.is_late:
            return False
        if not self._copies.may_begin(cache.step):
            return False
        self.reclaim_host(tokens)
        slots = self._space.alloc(tokens, cache.step)
        if slots is None:
            return False
        cache.tree_core.bind_host(node, slots)
        self._copies.begin([PendingCopy(node, slots)], device_slots(node), slots, cache.step)
        self._counts["checkpointed_tokens"] += tokens
        return True

    def _finish(self) -> None:
        """Wait for the copies of staged nodes; drop the nodes if these time out."""
        if not self._staged:
            return
        tree = self._cache.tree_core
        is_late = not self._copies.finish_all(_LAZY_TIMEOUT_S)
        for node in list(self._staged.values()):
            tree.unpin(node)
            if is_late and node.id in self._staged:
                self._counts["late_copies"] += 1
                tree.drop(node, self._free)
        self._staged.clear()

    # --- Host ----------------------------------------------------------------------------

    def reclaim_host(self, tokens: int) -> None:
        """Free host pages until ``tokens`` can be allocated, as far as possible.

        Only nodes that are on the host only, least recently used first, except those from which a
        waiting request resumes. O(host leaves).
        """
        tree = self._cache.tree_core
        shortage = self._space.shortage(tokens)
        if not shortage:
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
        self._counts["host_evicted_tokens"] += freed

    def _free(self, node: Node) -> None:
        """Free a node's host slots; those of a staged node are freed when its copy ends."""
        if self._staged.pop(node.id, None) is None:
            self._space.free(host_slots(node))
