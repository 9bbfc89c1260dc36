"""Builders that let a test read as a scenario."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from sglang_coserve.core.offline_queue import (
    OfflineQueue,
    OfflineQueueConfig,
    QueuedRequest,
    pack_tokens,
)
from sglang_coserve.core.offline_queue.prefix_trie import PrefixTrie, TrieLeaf

PREFIX_ONLY = OfflineQueueConfig(utility_ratio=1.0, max_overtakes=None, longest_first=False)
"""The prefix trie decides alone."""


def offline(
    rid: str,
    prompt: str | Iterable[int],
    *,
    arrival_s: float = 0.0,
    deadline_s: float | None = None,
    estimated_service_s: float = 0.0,
) -> QueuedRequest:
    """Build a request; a prompt of words has a token for every word."""
    token_ids = map(word_id, prompt.split()) if isinstance(prompt, str) else prompt
    return QueuedRequest(
        rid=rid,
        token_ids=pack_tokens(token_ids),
        arrival_s=arrival_s,
        max_new_tokens=100,
        deadline_s=deadline_s,
        estimated_service_s=estimated_service_s,
    )


def word_id(word: str) -> int:
    """Return a token id that is the same for equal words in every process."""
    return int.from_bytes(word.encode()[-4:], "big")


def num_shared_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the tokens of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def queue_of(*requests: QueuedRequest, config: OfflineQueueConfig = PREFIX_ONLY) -> OfflineQueue:
    """Build a queue in which the requests wait."""
    queue = OfflineQueue(config)
    for request in requests:
        queue.add(request)
    return queue


def pick(queue: OfflineQueue, now_s: float = 0.0) -> QueuedRequest | None:
    """Take the next request."""
    request = queue.peek(now_s)
    return None if request is None else queue.take(request.rid)


def pick_all(queue: OfflineQueue, now_s: float = 0.0) -> list[str]:
    """Pick until nothing waits."""
    rids = []
    while request := pick(queue, now_s):
        rids.append(request.rid)
    return rids


def check_trie(trie: PrefixTrie) -> None:
    """Assert that all nodes, links and positions are consistent, and no node is left over."""
    stack = [trie._root]
    while stack:
        node = stack.pop()
        assert node.parent is None or len(node.children) >= 2, "a node without a fork"
        for branch, child in node.children.items():
            assert child.parent is node
            assert child.branch(node.depth_bytes) == branch
            assert child.tokens[: node.depth_bytes] == node.tokens[: node.depth_bytes]
            if not isinstance(child, TrieLeaf):
                assert child.depth_bytes > node.depth_bytes
                stack.append(child)
        waiting = {branch: one for branch, one in node.children.items() if one.is_waiting}
        assert dict(node.waiting) == waiting
