"""Which request comes next when prefixes decide, and what that is worth."""

from __future__ import annotations

import itertools
import random

from core.offline_queue.offline_requests import (
    PREFIX_ONLY,
    num_shared_tokens,
    offline,
    pick_all,
    queue_of,
)
from sglang_coserve.core.offline_queue import OfflineQueueConfig, QueuedRequest, unpack_tokens


def test_requests_with_a_common_prefix_follow_each_other() -> None:
    """The example of HyGen §4.3."""
    queue = queue_of(
        offline("ml", "What is ML"),
        offline("code", "How to code"),
        offline("ai", "What is AI"),
        offline("debug", "How to debug"),
    )
    assert pick_all(queue) == ["ml", "ai", "code", "debug"]


def test_a_prefix_that_others_left_in_the_cache_comes_first() -> None:
    queue = queue_of(
        offline("cold-1", "shared template cold a"),
        offline("cold-2", "shared template cold b"),
        offline("warm-1", "shared template warm a"),
        offline("warm-2", "shared template warm b"),
    )
    online = offline("online", "shared template warm c").token_ids
    nearest = queue.nearest(online)
    assert nearest is not None
    queue.cached(nearest.rid, 3)
    assert pick_all(queue) == ["warm-1", "warm-2", "cold-1", "cold-2"]


def test_only_the_first_of_a_branch_is_news_to_the_cache() -> None:
    queue = queue_of(offline("a-1", "t a x"), offline("a-2", "t a y"), offline("b-1", "t b x"))
    queue.take("a-1")
    queue.add(offline("b-2", "t b y"))
    queue.add(offline("c-1", "t c x"))
    assert not queue.opens_branch("b-2")
    assert queue.opens_branch("c-1")


def test_prefixes_are_shared_far_more_often_than_in_order_of_arrival() -> None:
    """HyGen Fig. 6 counts what a prompt shares with the one before it, on MMLU.

    57 subjects, each with five examples before the question, in random order.
    """
    num_subjects, num_questions, example_tokens, question_tokens = 57, 20, 60, 15
    rng = random.Random(0)
    examples = [[rng.randrange(1000) for _ in range(example_tokens)] for _ in range(num_subjects)]
    requests = [
        offline(
            f"{subject}-{question}",
            examples[subject] + [rng.randrange(1000) for _ in range(question_tokens)],
        )
        for subject, question in itertools.product(range(num_subjects), range(num_questions))
    ]
    rng.shuffle(requests)

    by_prefix = served(requests, PREFIX_ONLY)
    by_arrival = served(requests, OfflineQueueConfig.fcfs())

    assert by_arrival == requests
    # Every subject's examples are computed once.
    assert shared_tokens(by_prefix) >= example_tokens * num_subjects * (num_questions - 1)
    assert shared_tokens(by_arrival) < shared_tokens(by_prefix) / 20


def served(requests: list[QueuedRequest], config: OfflineQueueConfig) -> list[QueuedRequest]:
    by_rid = {request.rid: request for request in requests}
    return [by_rid[rid] for rid in pick_all(queue_of(*requests, config=config))]


def shared_tokens(requests: list[QueuedRequest]) -> int:
    prompts = [list(unpack_tokens(request.token_ids)) for request in requests]
    return sum(num_shared_tokens(a, b) for a, b in itertools.pairwise(prompts))
