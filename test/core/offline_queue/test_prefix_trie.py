"""The prefix trie against a list."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.offline_queue.naive_trie import NaiveTrie, Prompt
from core.offline_queue.offline_requests import offline
from sglang_coserve.core.offline_queue import pack_tokens
from sglang_coserve.core.offline_queue.prefix_trie import PrefixTrie, TrieLeaf

# Three tokens and short prompts: equal prompts and prefixes of each other are common.
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


class TrieMachine(RuleBasedStateMachine):
    """Insert, suspend, resume and remove in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.trie = PrefixTrie()
        self.naive = NaiveTrie()
        self.leaves: dict[int, TrieLeaf] = {}
        self.num_inserted = 0

    def running(self) -> list[int]:
        return [number for number in self.leaves if number not in self.naive.waiting]

    @rule(prompt=prompts)
    def insert(self, prompt: Prompt) -> None:
        number = self.num_inserted
        self.num_inserted += 1
        self.leaves[number] = TrieLeaf(offline(str(number), prompt), number)
        self.trie.insert(self.leaves[number])
        self.naive.insert(number, prompt)

    @precondition(lambda self: self.naive.waiting)
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.naive.waiting))
        self.trie.suspend(self.leaves[number])
        self.naive.suspend(number)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.running()))
        self.trie.resume(self.leaves[number])
        self.naive.resume(number)

    @precondition(lambda self: self.leaves)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(list(self.leaves)))
        self.trie.remove(self.leaves.pop(number))
        self.naive.remove(number)

    @rule(prompt=prompts)
    def look(self, prompt: Prompt) -> None:
        leaves = self.trie.near(pack_tokens(prompt))
        assert [leaf.number for leaf in leaves] == self.naive.near(prompt)

    @invariant()
    def is_sound(self) -> None:
        self.trie.check_invariants()
        assert [leaf.number for leaf in self.trie.near(b"")] == self.naive.waiting


TestTrie = TrieMachine.TestCase
TestTrie.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_prompts_that_are_prefixes_of_each_other_may_be_thousands_deep() -> None:
    trie = PrefixTrie()
    lengths = list(range(1, 2001))
    random.Random(0).shuffle(lengths)
    leaves = {length: TrieLeaf(offline("r", [7] * length), length) for length in lengths}
    for leaf in leaves.values():
        trie.insert(leaf)
    trie.check_invariants()

    order = [leaf.number for leaf in trie.near(pack_tokens([7] * 2000))]
    assert order[0] in (1999, 2000)
    assert sorted(order) == sorted(lengths)

    for leaf in leaves.values():
        trie.remove(leaf)
    trie.check_invariants()
    assert list(trie.near(b"")) == []
