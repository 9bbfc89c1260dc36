"""A radix tree over token ids, evicted leaf by leaf: the prefixes that an engine has cached.

The tree counts KV but holds none. It has every prefix that requests have inserted; a node on the
path of a running request is locked. The simulator's prefix cache is one, and so is the cache of the
no-interference baseline.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field

from sglang_coserve.core.offline_queue.request import TOKEN_BYTES, common_prefix_bytes


@dataclass(eq=False, slots=True)
class Node:
    """An edge of the tree and what is below it."""

    parent: Node | None
    edge: bytes
    """Packed tokens, a positive number of whole pages; empty for the root."""

    depth_tokens: int
    """Tokens from the root to the end of this edge."""

    locks: int = 0
    """Requests whose path passes through this node."""

    rank: float = 0.0
    """The unlocked leaf with the least rank is evicted first."""

    children: dict[bytes, Node] = field(default_factory=dict)
    """Children by the first page of their edge."""

    @property
    def edge_tokens(self) -> int:
        """Tokens of the edge."""
        return len(self.edge) // TOKEN_BYTES


class PrefixTree:
    """The prefixes with KV on the device, in whole pages; evicts the least rank first.

    Whoever unlocks a prefix gives its rank. With the time as the rank, the least recently used
    prefix is evicted first.

    Tokens are packed (``core.offline_queue.pack_tokens``). Walks cost O(edges on
    the path) plus one ``memcmp`` of the prompt; ``evict`` costs O(log leaves) per leaf.
    """

    def __init__(self, page_tokens: int) -> None:
        assert page_tokens > 0, f"a page holds tokens: {page_tokens}"
        self._page_tokens = page_tokens
        self._page_bytes = page_tokens * TOKEN_BYTES
        self.root = Node(None, b"", 0)
        self.total_tokens = 0
        """Tokens in the tree."""

        self.evictable_tokens = 0
        """Tokens in the tree that no request holds."""

        self.version = 0
        """Incremented whenever the prefixes change; until then a match remains valid."""

        self.sharing_version = 0
        """Incremented whenever a prefix gets a further holder, or is left with one."""

        self._idle = Counter[int]()
        """Unlocked tokens by rank, rounded down."""

        self._leaves: list[tuple[float, int, Node]] = []
        self._num_pushed = 0

    def match(self, tokens: bytes, limit_tokens: int) -> int:
        """Return how many leading tokens are cached: whole pages, at most ``limit_tokens``."""
        return self._walk(self.root, tokens, self._aligned_bytes(limit_tokens))[1] // TOKEN_BYTES

    def lock(self, tokens: bytes, limit_tokens: int) -> Node:
        """Lock the longest cached prefix, as found by ``match``, and return its end."""
        stop = self._aligned_bytes(limit_tokens)
        node = self._split(*self._walk(self.root, tokens, stop), tokens)
        self._add_locks(node, self.root)
        return node

    def extend(self, node: Node, tokens: bytes, length_tokens: int) -> Node:
        """Insert a locked request's prefix of whole pages; move its lock to the new end, returned.

        ``node`` is the current position of the lock, the end of a shorter prefix.
        """
        stop = self._aligned_bytes(length_tokens)
        assert stop >= node.depth_tokens * TOKEN_BYTES, "the lock is beyond the prefix"
        reached, matched = self._walk(node, tokens, stop)
        end = self._split(reached, matched, tokens)
        new_tokens = (stop - matched) // TOKEN_BYTES
        if new_tokens:
            child = Node(end, tokens[matched:stop], stop // TOKEN_BYTES)
            end.children[self._page_at(tokens, matched)] = child
            end = child
            self.total_tokens += new_tokens
            self._add_idle(child, new_tokens)
            self.version += 1
        self._add_locks(end, node)
        return end

    def unlock(self, node: Node, rank: float) -> None:
        """Remove one lock from ``node``'s path, whose rank becomes at least ``rank``."""
        step: Node | None = node
        while step is not None and step is not self.root:
            assert step.locks > 0, "unlocked more often than locked"
            step.locks -= 1
            step.rank = max(step.rank, rank)
            if step.locks == 0:
                self._add_idle(step, step.edge_tokens)
                self._offer(step)
            elif step.locks == 1:
                self.sharing_version += 1
            step = step.parent

    def shared_tokens(self, node: Node) -> int:
        """Return how many tokens of a locked path have other holders, too. O(edges on the path)."""
        step = node
        while step.locks == 1 and step.parent is not None:
            step = step.parent
        return step.depth_tokens

    def idle_tokens(self, rank: float) -> int:
        """Return the unlocked tokens whose rank, rounded down, is at least ``rank``. O(ranks)."""
        return sum([tokens for known, tokens in self._idle.items() if known >= rank])

    def evict(self, tokens: int) -> int:
        """Evict ``tokens`` from the ends of unlocked leaves, the least rank first.

        Returns:
            The number of evicted tokens: whole pages, fewer than requested if nothing is
            left to evict.
        """
        evicted = 0
        while evicted < tokens and self._leaves:
            rank, _, leaf = heapq.heappop(self._leaves)
            parent = leaf.parent
            if leaf.locks or leaf.children or parent is None or leaf.rank != rank:
                continue
            kept_bytes = self._aligned_bytes(max(0, leaf.edge_tokens - (tokens - evicted)))
            dropped = leaf.edge_tokens - kept_bytes // TOKEN_BYTES
            if kept_bytes:
                leaf.edge = leaf.edge[:kept_bytes]
                leaf.depth_tokens -= dropped
                self._offer(leaf)
            else:
                del parent.children[leaf.edge[: self._page_bytes]]
                leaf.parent = None
                self._offer(parent)
            evicted += dropped
            self.total_tokens -= dropped
            self._add_idle(leaf, -dropped)
            self.version += 1
        return evicted

    def _walk(self, node: Node, tokens: bytes, stop: int) -> tuple[Node, int]:
        """Follow ``tokens`` down from ``node``.

        Returns:
            The last node reached, perhaps in the middle of its edge, and the
            bytes matched from the root.
        """
        matched = node.depth_tokens * TOKEN_BYTES
        while matched < stop:
            child = node.children.get(self._page_at(tokens, matched))
            if child is None:
                break
            end = min(stop, matched + len(child.edge))
            common = self._common_bytes(child.edge, tokens[matched:end])
            matched += common
            node = child
            if common < len(child.edge):
                break
        return node, matched

    def _common_bytes(self, edge: bytes, tokens: bytes) -> int:
        common = common_prefix_bytes(edge, tokens, 0, len(tokens))
        return common - common % self._page_bytes

    def _split(self, node: Node, matched: int, tokens: bytes) -> Node:
        """Return the node that ends at ``matched``, splitting ``node``'s edge if necessary.

        The lower part keeps the object, so that locks on it remain valid.
        """
        if matched == node.depth_tokens * TOKEN_BYTES:
            return node
        parent = node.parent
        assert parent is not None
        start = parent.depth_tokens * TOKEN_BYTES
        cut = matched - start
        head = Node(parent, node.edge[:cut], matched // TOKEN_BYTES, node.locks, node.rank)
        parent.children[self._page_at(tokens, start)] = head
        node.edge = node.edge[cut:]
        node.parent = head
        head.children[node.edge[: self._page_bytes]] = node
        return head

    def _add_locks(self, node: Node, above: Node) -> None:
        """Lock the path from ``node`` up to, but without, ``above``."""
        step = node
        while step is not above:
            if step.locks == 0:
                self._add_idle(step, -step.edge_tokens)
            step.locks += 1
            if step.locks >= 2:
                self.sharing_version += 1
            assert step.parent is not None, "the path does not pass the locked node"
            step = step.parent

    def _offer(self, node: Node) -> None:
        """Make ``node`` a candidate for ``evict`` if it is an unlocked leaf."""
        if node.locks == 0 and not node.children and node is not self.root:
            self._num_pushed += 1
            heapq.heappush(self._leaves, (node.rank, self._num_pushed, node))

    def _add_idle(self, node: Node, tokens: int) -> None:
        """Count ``tokens`` of ``node`` as unlocked; a negative number as locked or gone."""
        self.evictable_tokens += tokens
        key = math.floor(node.rank)
        self._idle[key] += tokens
        if not self._idle[key]:
            del self._idle[key]

    def aligned(self, tokens: int) -> int:
        """Return how many of this many tokens are in whole pages."""
        return tokens // self._page_tokens * self._page_tokens

    def _aligned_bytes(self, tokens: int) -> int:
        return tokens // self._page_tokens * self._page_bytes

    def _page_at(self, tokens: bytes, offset: int) -> bytes:
        return tokens[offset : offset + self._page_bytes]
