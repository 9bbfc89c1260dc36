"""Memory back from the radix tree: device pages from the tail, host pages within a quota."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any, Final

import torch

from sglang_coserve.core.kv_checkpoint import CheckpointMode, CheckpointPolicy, reclaim_tokens
from sglang_coserve.core.request import RequestClass
from sglang_coserve.srt.kv_checkpoint.copy_jobs import CopyJobs, LateCopy
from sglang_coserve.srt.kv_checkpoint.host_space import HostSpace
from sglang_coserve.srt.kv_checkpoint.tree_nodes import (
    bind_host,
    holder,
    is_offline_node,
    subtree,
)

__all__ = ["Reclaimer"]

Node = Any

_LAZY_TIMEOUT_S: Final = 1.0
"""How long online work waits at most for the copies of what is reclaimed (``LAZY``)."""

_UNDER_WAY_TIMEOUT_S: Final = 0.02
"""How long it waits at most where all that can be reclaimed is being copied already: a chunk of a
prompt that was computed a moment ago. Mostly a few ms, instead of computing the chunk again."""


class Reclaimer:
    """Takes memory from nodes that no running request uses, offline ones and old ones first."""

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
        """Free at least ``tokens`` device slots where possible; return how many.

        A node is split so that its head stays. A little more than asked for is taken
        of offline nodes, never of online ones. For a prefetch nothing is taken of what
        requests about to be admitted resume from, nor of what is being copied. O(leaves + freed).
        """
        cache = self._cache
        order = cache.eviction_strategy
        wanted = reclaim_tokens(tokens, self._policy.reclaim_tokens, cache.page_size)
        least = reclaim_tokens(tokens, 0, cache.page_size)
        heap = cache._make_eviction_heap()
        freed: list[torch.Tensor] = []
        num_freed = 0
        while heap:
            _, node = heapq.heappop(heap)
            limit = wanted if is_offline_node(node) else least
            is_copying = self._copies.is_copying(node)
            if num_freed >= limit:
                break
            if node.lock_ref or (for_prefetch and (is_copying or order.is_needed(node))):
                continue
            if is_copying and not self._copies.is_late:
                self._copies.finish_all(_UNDER_WAY_TIMEOUT_S)
            surplus = len(node.value) - (limit - num_freed)
            if surplus > 0:
                cache._split_node(node.key, node, surplus)
                self._counts["splits"] += 1
            num_freed += len(node.value)
            freed.append(self._take(node))
            cache._promote_parent(node, heap)
        self._finish()
        if freed:
            # Whole pages one after another: need not be looked for.
            cache.token_to_kv_pool_allocator.free_segment(torch.cat(freed), start_pos=0)
        return num_freed

    def _take(self, node: Node) -> torch.Tensor:
        """Take a leaf's device slots, which the caller frees; keep the node if it is saved."""
        slots: torch.Tensor = node.value
        if node.host_value is None and self._is_saved_late(node):
            node.protect_host()
            self._staged[id(node)] = node
        if node.host_value is not None:
            self._cache._detach_backuped(node)
            self._counts["demoted_tokens"] += len(slots)
            return slots
        for child in list(node.children.values()):
            self._drop(child)
        self._cache._record_remove_event(node)
        self._cache._delete_leaf(node)
        node.value = None  # For a copy of it that is under way.
        if is_offline_node(node):
            self._counts["dropped_tokens"] += len(slots)
        return slots

    # --- Lazy copies ---------------------------------------------------------------------

    def _is_saved_late(self, node: Node) -> bool:
        """Give the node host slots to be copied to before its device slots are freed."""
        cache, tokens = self._cache, len(node.value)
        if self._policy.mode is not CheckpointMode.LAZY:
            return False
        # What is on the host below a node is of use only with the node.
        if not is_offline_node(node) and not node.children:
            return False
        if self._copies.is_late:
            return False
        if not self._copies.may_begin(RequestClass.OFFLINE, cache.step):
            return False
        self.reclaim_host(RequestClass.OFFLINE, tokens)
        host_slots = self._space.alloc(RequestClass.OFFLINE, tokens, cache.step)
        if host_slots is None:
            return False
        bind_host(node, host_slots, RequestClass.OFFLINE)
        pieces = [LateCopy(node, host_slots)]
        self._copies.begin(pieces, node.value, host_slots, cache.step)
        self._counts["checkpointed_tokens"] += tokens
        return True

    def _finish(self) -> None:
        """Wait for the copies of staged nodes; drop the nodes if they do not come."""
        if not self._staged:
            return
        is_late = not self._copies.finish_all(_LAZY_TIMEOUT_S)
        for node in list(self._staged.values()):
            node.release_host()
            if is_late and id(node) in self._staged:
                self._counts["late_copies"] += 1
                self._drop(node)
        self._staged.clear()

    # --- Host ----------------------------------------------------------------------------

    def reclaim_host(self, request_class: RequestClass, tokens: int) -> None:
        """Let a class give up host pages until it may be granted ``tokens``, as far as it can.

        Only what is on the host alone, oldest use first, and nothing that a waiting
        request resumes from. O(host leaves).
        """
        cache = self._cache
        shortage = self._space.shortage(request_class, tokens)
        if not shortage:
            return
        heap = [
            (node.last_access_time, node)
            for node in cache.evictable_host_leaves
            if holder(node) is request_class
        ]
        heapq.heapify(heap)
        freed = 0
        while freed < shortage and heap:
            _, node = heapq.heappop(heap)
            if node.host_ref_counter or node.children or not node.evicted:
                continue
            freed += len(node.host_value)
            parent = node.parent
            self._drop(node)
            if parent in cache.evictable_host_leaves and holder(parent) is request_class:
                heapq.heappush(heap, (parent.last_access_time, parent))
        self._counts["host_evicted_tokens"] += freed

    def _drop(self, top: Node) -> None:
        """Take a node without device slots, and all below it, out of the tree."""
        cache = self._cache
        for node in subtree(top):
            assert node.evicted
            assert not node.lock_ref
            # Slots that are still the target of a copy are freed when it ends.
            if node.host_value is not None and self._staged.pop(id(node), None) is None:
                self._space.free(holder(node), node.host_value)
            node.host_value = None
            cache.evictable_host_leaves.discard(node)
        del top.parent.children[top.key.child_key(cache.page_size)]
        cache._update_leaf_status(top.parent)
        cache._update_host_leaf_status(top.parent)
