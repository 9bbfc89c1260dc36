"""SGLang's radix tree with operations on single nodes for checkpointing, and what a node says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from sglang_coserve.core.request import RequestClass
from sglang_coserve.srt import compat

Node = Any

EVICTION_RANK: Final = {RequestClass.OFFLINE: 0, RequestClass.ONLINE: 1}
"""Value of ``node.priority``, by the most important class that used the node; lower is evicted
first."""


class EvictionOrder:
    """The order in which leaves are evicted from the device: by class, then by last use.

    Nodes from which requests about to be admitted resume come last of all: otherwise
    they would lose this memory, round after round, to decoding requests. Within a class,
    nodes being copied come last, because soon they can be reclaimed without loss.
    """

    def __init__(self, is_copying: Callable[[Node], bool]) -> None:
        self.needed: set[int] = set()
        """Ids of such nodes; their ancestors are safe, as a leaf is evicted before these."""
        self._is_copying = is_copying

    def get_priority(self, node: Node) -> tuple[bool, int, bool, float]:
        """Return a sort key, of which the smallest is evicted first; called by SGLang, too."""
        is_needed, is_copying = self.is_needed(node), self._is_copying(node)
        return is_needed, node.priority, is_copying, node.last_access_time

    def is_needed(self, node: Node) -> bool:
        """Return whether a request about to be admitted resumes from a node."""
        return node.id in self.needed


def full(node: Node) -> Any:
    """Return SGLang's data on a node's full-attention KV: slots and locks."""
    return node.component_data[BASE_COMPONENT_TYPE]


def device_slots(node: Node) -> Any:
    """Return a node's device slots, one per token; None if it has none."""
    return full(node).value


def host_slots(node: Node) -> Any:
    """Return a node's host slots, one per token; None if it has none."""
    return full(node).host_value


def is_offline_node(node: Node) -> bool:
    """Return whether only offline requests have used a node."""
    return bool(node.priority <= EVICTION_RANK[RequestClass.OFFLINE])


def can_save(node: Node, root: Node) -> bool:
    """Return whether a node may get host slots: it is only on the device, and its parent is
    saved."""
    is_below_saved = node.parent is root or host_slots(node.parent) is not None
    return device_slots(node) is not None and host_slots(node) is None and is_below_saved


def unsaved_path(node: Node, root: Node) -> list[Node]:
    """Return the nodes from the root to ``node`` that have no host slots, top first.

    The saved nodes are the first ones of the path, so the walk up ends at the first saved node.
    """
    path = []
    while node is not root and host_slots(node) is None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def path_to(node: Node, top: Node) -> list[Node]:
    """Return the nodes below ``top``, one of its ancestors, down to ``node``. O(path)."""
    path = []
    while node is not top and node is not None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def subtree(node: Node) -> list[Node]:
    """Return a node and all its descendants, parents first."""
    nodes = [node]
    for parent in nodes:
        nodes.extend(parent.children.values())
    return nodes


TREE_BACKEND: Final = "coserve_checkpoint"
"""Name of the tree among SGLang's ``SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND``."""


_OwnDuplicates: Any = compat.own_duplicates_tree(UnifiedTreeCore)


class CheckpointTree(_OwnDuplicates):
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
