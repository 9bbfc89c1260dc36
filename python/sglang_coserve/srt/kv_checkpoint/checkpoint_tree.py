"""SGLang's radix tree with operations on single nodes for checkpointing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from sglang_coserve.core.request import RequestClass
from sglang_coserve.srt.kv_checkpoint.tree_nodes import (
    EVICTION_RANK,
    device_slots,
    full,
    host_slots,
    subtree,
)

__all__ = ["TREE_BACKEND", "CheckpointTree"]

Node = Any

TREE_BACKEND: Final = "coserve_checkpoint"
"""Name of the tree among SGLang's ``SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND``."""


class CheckpointTree(UnifiedTreeCore):
    """A tree whose nodes can be split, evicted from the device and restored one at a time.

    SGLang's own tree chooses the nodes itself, and handles only whole nodes.
    """

    def __init__(self, params: Any, components: Any) -> None:
        self._pins: Counter[int] = Counter()
        self.on_split: Callable[[Node, Node], None] | None = None
        """Called with a node that was split and the new node for its first part."""
        super().__init__(params, components)

    def reset(self) -> None:
        """Remove all nodes."""
        self._pins.clear()
        super().reset()

    # --- Host slots ----------------------------------------------------------------------

    def bind_host(self, node: Node, slots: torch.Tensor) -> None:
        """Assign host slots to a node."""
        assert host_slots(node) is None
        assert len(slots) == len(node.key)
        self.commit_backup(node.id, slots, {})
        self.finish_write_through([node.id], ack_id=node.id)

    def add_on_host(self, parent: Node, key: Any, slots: torch.Tensor) -> Node:
        """Return a new offline node of ``key`` whose KV is on the host alone, in ``slots``.

        ``parent`` has host slots or is the root, and no child that begins like ``key``.
        """
        inserted = self.insert_host(parent.id, key, slots, []).inserted_host_node
        node = self.node_by_id(inserted)
        assert len(node.key) == len(slots)
        node.hash_value = None
        node.priority = EVICTION_RANK[RequestClass.OFFLINE]
        return node

    def _is_settled_full_host_duplicate(self, _node: Node) -> bool:
        # Since 0.5.22 SGLang may free such host slots; ours are counted.
        return False

    def pin(self, node: Node) -> None:
        """Protect a node's host slots, and so the node, until ``unpin``. Calls are counted.

        SGLang's own host locks count only while a node has host slots, which may change
        between lock and unlock.
        """
        self._pins[node.id] += 1
        self._update_evictable_leaf_sets(node)

    def unpin(self, node: Node) -> None:
        """Undo one ``pin``."""
        self._pins[node.id] -= 1
        if not self._pins[node.id]:
            del self._pins[node.id]
            self._update_evictable_leaf_sets(node)

    def _is_host_leaf(self, node: Node) -> bool:
        return node.id not in self._pins and super()._is_host_leaf(node)

    # --- Splits --------------------------------------------------------------------------

    def split(self, node: Node, tokens: int) -> Node:
        """Split a node: return a new node with its first ``tokens`` tokens; it keeps the rest."""
        return self._split_node(node.key, node, tokens)[0]

    def _split_node(self, key: Any, child: Node, split_len: int) -> tuple[Node, Any]:
        head, action = super()._split_node(key, child, split_len)
        if self.on_split is not None:
            self.on_split(child, head)
        return head, action

    # --- Device slots --------------------------------------------------------------------

    def take_device_slots(self, leaf: Node) -> torch.Tensor:
        """Remove and return the device slots of an evictable leaf; the caller frees them.

        The node stays in the tree if it has host slots; otherwise it is removed, and must have no
        children.
        """
        if host_slots(leaf) is not None:
            result = self.demote(leaf.id)
        else:
            result = self.evict_device_leaf(leaf.id, is_write_back=False)
            full(leaf).value = None  # Shows a copy in flight that the node is gone.
        (slots,) = result.device_frees.pop(BASE_COMPONENT_TYPE)
        return slots

    def put_on_device(self, node: Node, slots: torch.Tensor) -> None:
        """Assign device slots that hold its KV to a node that has only host slots."""
        self._unevict_node_on_insert(node, slots)

    # --- Nodes on the host only ----------------------------------------------------------

    def drop(self, top: Node, free: Callable[[Node], None]) -> None:
        """Remove a node without device slots, and its subtree, from the tree. O(nodes).

        ``free`` is called with each node that has host slots.
        """
        for node in reversed(subtree(top)):
            assert device_slots(node) is None
            assert not full(node).lock_ref
            if host_slots(node) is not None:
                free(node)
                full(node).host_value = None
            self.evictable_host_leaves.discard(node)
            self._remove_leaf_from_parent(node)
        self._update_evictable_leaf_sets(top.parent)


register_tree_core_backend(TREE_BACKEND, CheckpointTree)
