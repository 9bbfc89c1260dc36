"""A trie as deep as prompts are long; for all else see ``test_offline_queue_machine``."""

from __future__ import annotations

import random

from core.offline_queue.offline_requests import check_trie, offline
from sglang_coserve.core.offline_queue import pack_tokens
from sglang_coserve.core.offline_queue.prefix_trie import PrefixTrie, TrieLeaf


def test_prompts_that_are_prefixes_of_each_other_may_be_thousands_deep() -> None:
    trie = PrefixTrie()
    lengths = list(range(1, 2001))
    random.Random(0).shuffle(lengths)
    leaves = {length: TrieLeaf(offline("r", [7] * length), length) for length in lengths}
    for leaf in leaves.values():
        trie.insert(leaf)
    check_trie(trie)

    order = [leaf.number for leaf in trie.near(pack_tokens([7] * 2000))]
    assert order[0] in (1999, 2000)
    assert sorted(order) == sorted(lengths)

    for leaf in leaves.values():
        trie.remove(leaf)
    check_trie(trie)
    assert list(trie.near(b"")) == []
