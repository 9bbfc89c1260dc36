"""A compressed prefix trie, in which requests with a common prefix are neighbours."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeAlias

from sglang_coserve.core.offline_queue.request import (
    TOKEN_BYTES,
    QueuedRequest,
    common_prefix_bytes,
)


class TrieLeaf:
    """A request in the trie; it keeps its position while it waits and while it runs."""

    __slots__ = ("is_waiting", "number", "parent", "request")

    def __init__(self, request: QueuedRequest, number: int) -> None:
        self.request = request
        self.number = number
        self.is_waiting = False
        self.parent: _Node | None = None

    @property
    def tokens(self) -> bytes:
        """The packed prompt."""
        return self.request.token_ids

    @property
    def depth_bytes(self) -> int:
        """Length of the packed prompt."""
        return len(self.request.token_ids)

    def branch(self, depth_bytes: int) -> bytes | int:
        """Return the key under which a node of this depth holds the leaf."""
        return self.tokens[depth_bytes : depth_bytes + TOKEN_BYTES] or self.number


class _Node:
    """A prefix after which at least two requests diverge.

    ``tokens`` is the prompt of any request below it, past or present, of which
    the first ``depth_bytes`` are the prefix. So edges need no text of their own,
    and splitting or joining them copies nothing. A node keeps at most one prompt
    alive after its request has left.
    """

    __slots__ = ("children", "depth_bytes", "parent", "tokens", "waiting")

    def __init__(self, parent: _Node | None, tokens: bytes, depth_bytes: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.depth_bytes = depth_bytes
        self.children: dict[bytes | int, _Child] = {}
        self.waiting: OrderedDict[bytes | int, _Child] = OrderedDict()
        """The children with waiting requests below them, in their order."""

    @property
    def is_waiting(self) -> bool:
        """True when a request below this node waits."""
        return bool(self.waiting)

    def branch(self, depth_bytes: int) -> bytes | int:
        """Return the key under which a node of this depth holds this one."""
        return self.tokens[depth_bytes : depth_bytes + TOKEN_BYTES]


_Child: TypeAlias = _Node | TrieLeaf


class PrefixTrie:
    """Orders requests by the prefixes that they share (HyGen §4.3, A.2).

    ``near`` yields the waiting requests, those with the longest prefix in common
    with a given prompt first. Given the prompt that was taken last, this continues a
    depth-first search. Among the children of a node the order is as follows:

    - a new child goes last, so that arrivals do not displace the branch that is
      being served, and a branch is served until none of its requests waits;
    - a child whose requests all ran, and below which a request waits again or
      newly arrives, goes first: something below it runs, so its prefix is in the
      KV cache;
    - a child goes first when ``promote`` reports that other requests have left more of its
      prompt in the KV cache than the node's own prefix.

    A request is a child of the node at which its prompt diverges from all others, keyed by
    its next token; if its prompt ends at a node, keyed by its own number. So no leaf
    is an ancestor of another, and equal prompts are neighbours. Nodes exist
    only where prompts diverge, so there are fewer nodes than requests.
    """

    def __init__(self) -> None:
        self._root = _Node(None, b"", 0)

    def near(self, tokens: bytes) -> Iterator[TrieLeaf]:
        """Yield the waiting leaves, nearest to the packed prompt ``tokens`` first.

        The trie must not change meanwhile. The first leaf costs O(prompt tokens),
        all of them O(trie).
        """
        current: _Child | None = self._nearest(tokens)
        done: _Child | None = None
        while current is not None:
            if current.is_waiting:
                yield from _waiting_below(current, done)
            done, current = current, current.parent

    def insert(self, leaf: TrieLeaf) -> None:
        """Add a new leaf as waiting. O(prompt tokens)."""
        tokens = leaf.tokens
        node = self._root
        while child := node.children.get(leaf.branch(node.depth_bytes)):
            depth_bytes = common_prefix_bytes(
                tokens, child.tokens, node.depth_bytes, min(child.depth_bytes, len(tokens))
            )
            if isinstance(child, _Node) and depth_bytes == child.depth_bytes:
                node = child
            else:
                node = _split(node, child, depth_bytes)
        node.children[leaf.branch(node.depth_bytes)] = leaf
        leaf.parent = node
        _wait(leaf, is_new=True)

    def suspend(self, leaf: TrieLeaf) -> None:
        """Mark a waiting leaf as running: it keeps its position but ``near`` skips it.

        O(nodes above).
        """
        assert leaf.is_waiting
        leaf.is_waiting = False
        child: _Child = leaf
        while (parent := child.parent) is not None:
            del parent.waiting[child.branch(parent.depth_bytes)]
            if parent.is_waiting:
                break
            child = parent

    def resume(self, leaf: TrieLeaf) -> None:
        """Mark a running leaf as waiting again, at its old position. O(nodes above)."""
        assert not leaf.is_waiting
        _wait(leaf, is_new=False)

    def promote(self, leaf: TrieLeaf, cached_bytes: int) -> None:
        """Put a waiting leaf first at each node whose prefix is shorter than ``cached_bytes``.

        O(nodes above).
        """
        assert leaf.is_waiting
        child: _Child = leaf
        while (parent := child.parent) is not None:
            if cached_bytes > parent.depth_bytes:
                parent.waiting.move_to_end(child.branch(parent.depth_bytes), last=False)
            child = parent

    def remove(self, leaf: TrieLeaf) -> None:
        """Remove a leaf, waiting or not. O(nodes above)."""
        if leaf.is_waiting:
            self.suspend(leaf)
        node = leaf.parent
        assert node is not None
        del node.children[leaf.branch(node.depth_bytes)]
        leaf.parent = None
        if node.parent is not None and len(node.children) == 1:
            _contract(node, node.parent)

    def _nearest(self, tokens: bytes) -> _Child:
        """Return the root of the subtree that shares the longest prefix with ``tokens``."""
        node = self._root
        while child := node.children.get(tokens[node.depth_bytes : node.depth_bytes + TOKEN_BYTES]):
            edge = slice(node.depth_bytes, child.depth_bytes)
            if isinstance(child, TrieLeaf) or child.tokens[edge] != tokens[edge]:
                return child
            node = child
        return node


def _waiting_below(top: _Child, done: _Child | None) -> Iterator[TrieLeaf]:
    """Yield the waiting leaves below ``top`` in list order, except those below ``done``."""
    if isinstance(top, TrieLeaf):
        yield top
        return
    stack: list[Iterator[_Child]] = [iter(top.waiting.values())]
    while stack:
        for child in stack[-1]:
            if child is done:
                continue
            if isinstance(child, _Node):
                stack.append(iter(child.waiting.values()))
                break
            yield child
        else:
            stack.pop()


def _wait(leaf: TrieLeaf, *, is_new: bool) -> None:
    """Link a leaf, and those nodes above it that had no waiting leaf below them."""
    leaf.is_waiting = True
    child: _Child = leaf
    while (parent := child.parent) is not None:
        was_waiting = parent.is_waiting
        branch = child.branch(parent.depth_bytes)
        parent.waiting[branch] = child
        parent.waiting.move_to_end(branch, last=child is leaf and is_new)
        if was_waiting:
            break
        child = parent


def _split(parent: _Node, child: _Child, depth_bytes: int) -> _Node:
    """Insert a node of the given depth into the edge from ``parent`` to ``child``."""
    node = _Node(parent, child.tokens, depth_bytes)
    branch = child.branch(parent.depth_bytes)
    parent.children[branch] = node
    node.children[child.branch(depth_bytes)] = child
    child.parent = node
    if child.is_waiting:
        parent.waiting[branch] = node  # In its place.
        node.waiting[child.branch(depth_bytes)] = child
    return node


def _contract(node: _Node, parent: _Node) -> None:
    """Replace a node that has only one child left by that child."""
    (child,) = node.children.values()
    branch = child.branch(parent.depth_bytes)
    if child.is_waiting:
        parent.waiting[branch] = child  # In the node's place.
    parent.children[branch] = child
    child.parent = parent
