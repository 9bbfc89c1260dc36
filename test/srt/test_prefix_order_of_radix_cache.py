"""The prefix order of 50,000 offline requests is a depth-first order of SGLang's own radix tree."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable

from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from core.offline_queue.offline_requests import num_shared_tokens, offline, pick_all, queue_of

NUM_LINES = 50_000


def lines() -> list[list[int]]:
    """Return prompts of three levels; some are another's beginning, some are another's twin."""
    rng = random.Random(1)
    tasks = [[task] * 20 for task in range(8)]
    subjects = [[100 + subject] * rng.randint(10, 30) for subject in range(57)]
    return [
        rng.choice(tasks)
        + rng.choice(subjects)
        + [rng.randrange(1000, 1030) for _ in range(rng.randint(0, 12))]
        for _ in range(NUM_LINES)
    ]


def new_tokens(prompts: Iterable[list[int]]) -> int:
    """Count the tokens that each prompt does not share with the one before it."""
    total, before = 0, list[int]()
    for prompt in prompts:
        total += len(prompt) - num_shared_tokens(before, prompt)
        before = prompt
    return total


def test_the_order_visits_every_edge_of_the_radix_tree_once() -> None:
    prompts = lines()
    tree = RadixCache.create_simulated()
    for prompt in prompts:
        tree.insert(InsertParams(key=RadixKey(token_ids=array("q", prompt))))
    queue = queue_of(*(offline(str(place), prompt) for place, prompt in enumerate(prompts)))
    ordered = [prompts[int(rid)] for rid in pick_all(queue)]
    assert len(ordered) == NUM_LINES
    # An order is depth-first exactly when each subtree is visited in one piece: then each token of
    # the tree is new to the line before it once.
    assert new_tokens(ordered) == tree.total_size() < new_tokens(prompts) / 5
