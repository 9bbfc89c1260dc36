"""Orders requests by a time, such as their arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sortedcontainers import SortedList

from sglang_coserve.core.offline_queue.prefix_trie import TrieLeaf
from sglang_coserve.core.offline_queue.request import QueuedRequest


class TimeOrder:
    """Leaves sorted by a key of their request, smallest first; ties by insertion number.

    Keyed by arrival it is HyGen A.3's freshness tree, keyed by latest start a
    deadline order. ``moment`` of a request must not change while
    its leaf is in the order. Adding and removing are O(log n), ``first`` is O(1).
    """

    def __init__(self, moment: Callable[[QueuedRequest], float]) -> None:
        self._moment = moment
        self._leaves = SortedList()

    def __len__(self) -> int:
        return len(self._leaves)

    def __iter__(self) -> Iterator[TrieLeaf]:
        """Yield the leaves in order; the order must not change meanwhile."""
        return (leaf for _, _, leaf in self._leaves)

    @property
    def first(self) -> TrieLeaf:
        """The leaf with the smallest key; the order must not be empty."""
        leaf: TrieLeaf = self._leaves[0][2]
        return leaf

    def add(self, leaf: TrieLeaf) -> None:
        """Add a leaf."""
        self._leaves.add((self._moment(leaf.request), leaf.number, leaf))

    def remove(self, leaf: TrieLeaf) -> None:
        """Remove a leaf, which must be present."""
        self._leaves.remove((self._moment(leaf.request), leaf.number, leaf))
