"""Accessors and the eviction order for nodes of SGLang's radix tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE

from sglang_coserve.core.request import RequestClass

__all__ = [
    "EVICTION_RANK",
    "EvictionOrder",
    "can_save",
    "device_slots",
    "full",
    "host_slots",
    "is_offline_node",
    "path_to",
    "subtree",
    "unsaved_path",
]

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


def path_to(node: Node, root: Node) -> list[Node]:
    """Return the nodes from the root, which is left out, to ``node``. O(path)."""
    path = []
    while node is not root and node is not None:
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
