"""The radix tree against a set of prefixes, and what an LRU over leaves must do."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_coserve.core.offline_queue import PackedTokens, pack_tokens
from sglang_coserve.core.offline_queue.request import TOKEN_BYTES
from sglang_coserve.simulator.prefix_cache import Node, SimulatedPrefixCache
from simulator.engines import check_cache

PAGE = 2
A, B, C = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9], [7, 7, 7, 7]


def hold(cache: SimulatedPrefixCache, token_ids: list[int]) -> Node:
    tokens = pack_tokens(token_ids)
    return cache.extend(cache.lock(tokens, len(token_ids)), tokens, len(token_ids))


def held(cache: SimulatedPrefixCache, token_ids: list[int]) -> int:
    return cache.match(pack_tokens(token_ids), len(token_ids))


def test_the_least_recently_used_goes_first_and_the_locked_stays() -> None:
    cache = SimulatedPrefixCache(PAGE)
    a, b, c = (hold(cache, ids) for ids in (A, B, C))
    for node in (c, a):
        cache.unlock(node)
    assert cache.evict(2) == 2
    assert (held(cache, C), held(cache, A)) == (2, 6)
    cache.unlock(hold(cache, C[:2]))
    assert cache.evict(100) == 4
    assert (held(cache, C), held(cache, A), held(cache, B)) == (0, 4, 6)
    cache.unlock(b)
    assert cache.evict(100) == 6
    assert cache.total_tokens == cache.evictable_tokens == 0


class Tree(RuleBasedStateMachine):
    """Requests hold and release prefixes; the model is the set of their page-long heads."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = SimulatedPrefixCache(PAGE)
        self.heads: set[PackedTokens] = set()
        self.locked: list[tuple[PackedTokens, Node]] = []

    def heads_of(self, tokens: PackedTokens) -> list[PackedTokens]:
        step = PAGE * TOKEN_BYTES
        return [
            PackedTokens(tokens[: i + step]) for i in range(0, len(tokens) // step * step, step)
        ]

    @rule(ids=st.lists(st.integers(0, 2), min_size=1, max_size=14), split=st.integers(0, 14))
    def hold(self, ids: list[int], split: int) -> None:
        tokens = pack_tokens(ids)
        match = self.cache.match(tokens, len(ids))
        assert match == PAGE * sum(head in self.heads for head in self.heads_of(tokens))
        node = self.cache.lock(tokens, len(ids))
        assert node.depth_tokens == match
        for length in (max(match, min(split, len(ids))), len(ids)):
            node = self.cache.extend(node, tokens, length)
        self.heads.update(self.heads_of(tokens))
        self.locked.append((tokens, node))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, node = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.cache.unlock(node)

    @rule(tokens=st.integers(1, 20))
    def evict(self, tokens: int) -> None:
        evictable, total = self.cache.evictable_tokens, self.cache.total_tokens
        evicted = self.cache.evict(tokens)
        assert evicted == min(-(-tokens // PAGE) * PAGE, evictable)
        assert self.cache.total_tokens == total - evicted
        self.heads = {
            head
            for head in self.heads
            if self.cache.match(head, len(head) // TOKEN_BYTES) * TOKEN_BYTES == len(head)
        }

    @invariant()
    def heads_match(self) -> None:
        check_cache(self.cache)
        assert self.cache.total_tokens == PAGE * len(self.heads)
        kept = {head for tokens, _ in self.locked for head in self.heads_of(tokens)}
        assert kept <= self.heads
        assert self.cache.evictable_tokens == PAGE * len(self.heads - kept)
        for tokens, node in self.locked:
            assert node.depth_tokens == PAGE * len(self.heads_of(tokens))
            others = [t for t, n in self.locked if n is not node or t is not tokens]
            shared = {head for t in others for head in self.heads_of(t)}
            assert self.cache.shared_tokens(node) == PAGE * sum(
                head in shared for head in self.heads_of(tokens)
            )


Tree.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestTree = Tree.TestCase
