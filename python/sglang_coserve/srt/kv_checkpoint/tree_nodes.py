"""What checkpointing reads and notes on the nodes of SGLang's radix tree."""

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
    "holder",
    "host_slots",
    "is_offline_node",
    "subtree",
    "unsaved_path",
]

Node = Any

EVICTION_RANK: Final = {RequestClass.OFFLINE: 0, RequestClass.ONLINE: 1}
"""``node.priority`` by the most important class that used the node: less is evicted first."""


class EvictionOrder:
    """Which leaf gives up its device slots first: the class decides, then the last use.

    What requests about to be admitted resume from comes last of all: their plan has given
    them this room, and would otherwise see them lose it again, pass after pass, to the rows
    that decode. Of a class, what is being copied comes last: in a moment it can be reclaimed
    and nothing is lost.
    """

    def __init__(self, is_copying: Callable[[Node], bool]) -> None:
        self.needed: set[int] = set()
        """Ids of nodes; nothing above a leaf is evicted before it."""
        self._is_copying = is_copying

    def get_priority(self, node: Node) -> tuple[bool, int, bool, float]:
        """Return a key, the least of which is evicted first; SGLang asks for it."""
        is_needed, is_copying = self.is_needed(node), self._is_copying(node)
        return is_needed, node.priority, is_copying, node.last_access_time

    def is_needed(self, node: Node) -> bool:
        """Return whether a request about to be admitted resumes from a node."""
        return node.id in self.needed


def full(node: Node) -> Any:
    """Return what SGLang keeps of a node's KV of all layers: slots and locks."""
    return node.component_data[BASE_COMPONENT_TYPE]


def device_slots(node: Node) -> Any:
    """Return a node's device slots, one a token; None if it has none."""
    return full(node).value


def host_slots(node: Node) -> Any:
    """Return a node's host slots, one a token; None if it has none."""
    return full(node).host_value


def is_offline_node(node: Node) -> bool:
    """Return whether only offline requests have used a node."""
    return bool(node.priority <= EVICTION_RANK[RequestClass.OFFLINE])


def can_save(node: Node, root: Node) -> bool:
    """Return whether a node may get host slots: it is on the device alone, below a saved one."""
    is_below_saved = node.parent is root or host_slots(node.parent) is not None
    return device_slots(node) is not None and host_slots(node) is None and is_below_saved


def holder(node: Node) -> RequestClass:
    """Return the class whose quota the node's host slots count towards."""
    request_class = node.host_holder
    assert isinstance(request_class, RequestClass)
    return request_class


def unsaved_path(node: Node, root: Node) -> list[Node]:
    """Return the nodes from the root to ``node`` that have no host slots, top first.

    What is saved is a head of the path, so the walk ends at the first saved node.
    """
    path = []
    while node is not root and host_slots(node) is None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def subtree(node: Node) -> list[Node]:
    """Return a node and all below it, parents first."""
    nodes = [node]
    for parent in nodes:
        nodes.extend(parent.children.values())
    return nodes
