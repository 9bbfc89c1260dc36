"""The radix tree against a set of prefixes with ranks; the least rank is evicted first."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_coserve.core.offline_queue import PackedTokens, pack_tokens
from sglang_coserve.core.offline_queue.request import TOKEN_BYTES
from sglang_coserve.core.prefix_tree import Node, PrefixTree
from simulator.engines import check_cache

PAGE = 2
A, B, C = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9], [7, 7, 7, 7]


def hold(cache: PrefixTree, token_ids: list[int]) -> Node:
    tokens = pack_tokens(token_ids)
    return cache.extend(cache.lock(tokens, len(token_ids)), tokens, len(token_ids))


def held(cache: PrefixTree, token_ids: list[int]) -> int:
    return cache.match(pack_tokens(token_ids), len(token_ids))


def test_the_least_rank_goes_first_and_the_locked_stays() -> None:
    cache = PrefixTree(PAGE)
    a, b, c = (hold(cache, ids) for ids in (A, B, C))
    cache.unlock(c, 1.0)
    cache.unlock(a, 2.0)
    assert cache.evict(2) == 2
    assert (held(cache, C), held(cache, A)) == (2, 6)
    cache.unlock(hold(cache, C[:2]), 3.0)
    assert cache.evict(100) == 4
    assert (held(cache, C), held(cache, A), held(cache, B)) == (0, 4, 6)
    cache.unlock(b, 4.0)
    assert cache.evict(100) == 6
    assert cache.total_tokens == cache.evictable_tokens == 0


def test_a_higher_rank_outlives_a_later_use() -> None:
    cache = PrefixTree(PAGE)
    cache.unlock(hold(cache, A), 310.0)
    cache.unlock(hold(cache, C), 20.0)
    assert cache.evict(4) == 4
    assert (held(cache, A), held(cache, C)) == (6, 0)


def test_a_lower_rank_leaves_the_higher_one() -> None:
    """A request without a lease uses the prefix of a request with a lease."""
    cache = PrefixTree(PAGE)
    cache.unlock(hold(cache, A), 310.0)
    cache.unlock(hold(cache, B), 20.0)
    assert cache.idle_tokens(310.0) == 6
    assert cache.evict(2) == 2
    assert (held(cache, A), held(cache, B)) == (6, 4)


def test_idle_tokens_are_those_of_a_rank_at_least_as_high() -> None:
    cache = PrefixTree(PAGE)
    cache.unlock(hold(cache, A), 10.5)
    cache.unlock(hold(cache, C), 20.0)
    locked = hold(cache, C[:2])
    assert [cache.idle_tokens(rank) for rank in (0, 10, 11, 20, 21)] == [8, 8, 2, 2, 0]
    cache.unlock(locked, 30.0)
    assert [cache.idle_tokens(rank) for rank in (0, 11, 21)] == [10, 4, 2]


def heads_of(tokens: PackedTokens) -> list[PackedTokens]:
    """The prefixes of whole pages."""
    step = PAGE * TOKEN_BYTES
    return [PackedTokens(tokens[: i + step]) for i in range(0, len(tokens) // step * step, step)]


class Tree(RuleBasedStateMachine):
    """Requests hold and release prefixes; the model has the rank of each of their heads.

    A head is a prefix of whole pages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixTree(PAGE)
        self.heads: dict[PackedTokens, float] = {}
        self.locked: list[tuple[PackedTokens, Node]] = []

    @rule(ids=st.lists(st.integers(0, 2), min_size=1, max_size=14), split=st.integers(0, 14))
    def hold(self, ids: list[int], split: int) -> None:
        tokens = pack_tokens(ids)
        match = self.cache.match(tokens, len(ids))
        assert match == PAGE * sum(head in self.heads for head in heads_of(tokens))
        node = self.cache.lock(tokens, len(ids))
        assert node.depth_tokens == match
        for length in (max(match, min(split, len(ids))), len(ids)):
            node = self.cache.extend(node, tokens, length)
        for head in heads_of(tokens):
            self.heads.setdefault(head, 0.0)
        self.locked.append((tokens, node))

    @precondition(lambda self: self.locked)
    @rule(data=st.data(), rank=st.floats(0, 9))
    def release(self, data: st.DataObject, rank: float) -> None:
        tokens, node = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.cache.unlock(node, rank)
        for head in heads_of(tokens):
            self.heads[head] = max(self.heads[head], rank)

    @rule(tokens=st.integers(1, 20))
    def evict(self, tokens: int) -> None:
        evictable, total = self.cache.evictable_tokens, self.cache.total_tokens
        evicted = self.cache.evict(tokens)
        assert evicted == min(-(-tokens // PAGE) * PAGE, evictable)
        assert self.cache.total_tokens == total - evicted
        before, self.heads = (
            self.heads,
            {
                head: rank
                for head, rank in self.heads.items()
                if self.cache.match(head, len(head) // TOKEN_BYTES) * TOKEN_BYTES == len(head)
            },
        )
        gone = [rank for head, rank in before.items() if head not in self.heads]
        assert max(gone, default=0.0) <= min(self.idle().values(), default=9.0)

    def idle(self) -> dict[PackedTokens, float]:
        """Ranks of the heads that no request holds."""
        kept = {head for tokens, _ in self.locked for head in heads_of(tokens)}
        return {head: rank for head, rank in self.heads.items() if head not in kept}

    @invariant()
    def heads_match(self) -> None:
        check_cache(self.cache)
        assert self.cache.total_tokens == PAGE * len(self.heads)
        assert all(head in self.heads for tokens, _ in self.locked for head in heads_of(tokens))
        idle = Counter(map(math.floor, self.idle().values()))
        assert self.cache.evictable_tokens == PAGE * idle.total()
        for rank in range(10):
            tokens_of_rank = PAGE * sum(count for at, count in idle.items() if at >= rank)
            assert self.cache.idle_tokens(rank) == tokens_of_rank
        for tokens, node in self.locked:
            assert node.depth_tokens == PAGE * len(heads_of(tokens))
            others = [t for t, n in self.locked if n is not node or t is not tokens]
            shared = {head for t in others for head in heads_of(t)}
            assert self.cache.shared_tokens(node) == PAGE * sum(
                head in shared for head in heads_of(tokens)
            )


Tree.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestTree = Tree.TestCase
