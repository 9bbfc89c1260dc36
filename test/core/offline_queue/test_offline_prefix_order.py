"""Which request comes next when prefixes decide, and what that is worth."""

from __future__ import annotations

import itertools
import random

from core.offline_queue.offline_requests import (
    PREFIX_ONLY,
    num_shared_tokens,
    offline,
    pick,
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


def test_the_next_request_is_the_nearest_relative_of_the_last() -> None:
    queue = queue_of(
        offline("other", "Sort these numbers"),
        offline("law", "Answer briefly law torts"),
        offline("physics-1", "Answer briefly physics optics lens"),
        offline("physics-2", "Answer briefly physics heat"),
        offline("physics-3", "Answer briefly physics optics mirror"),
    )
    queue.take("physics-1")
    assert pick_all(queue) == ["physics-3", "physics-2", "law", "other"]


def test_order_goes_on_from_a_request_taken_for_its_age() -> None:
    queue = queue_of(
        offline("hot-1", "hot a", arrival_s=1),
        offline("hot-2", "hot b", arrival_s=2),
        offline("hot-3", "hot c", arrival_s=3),
        offline("old", "cold a", arrival_s=0),
        offline("young", "cold b", arrival_s=4),
        config=OfflineQueueConfig(utility_ratio=1.0, max_overtakes=2, deadline_slack_s=None),
    )
    assert pick_all(queue) == ["hot-1", "hot-2", "old", "young", "hot-3"]


def test_equal_prompts_follow_each_other_in_order_of_arrival() -> None:
    queue = queue_of(
        offline("a-1", "same prompt"),
        offline("b-1", "another prompt"),
        offline("a-2", "same prompt"),
        offline("b-2", "another prompt"),
        offline("a-longer", "same prompt and more"),
    )
    assert pick_all(queue) == ["a-1", "a-2", "a-longer", "b-1", "b-2"]


def test_an_arrival_does_not_displace_the_branch_that_is_served() -> None:
    queue = queue_of(offline("a-1", "a x"), offline("a-2", "a y"), offline("a-3", "a z"))
    assert pick(queue, 0.0) == offline("a-1", "a x")
    queue.add(offline("b-1", "b x"))
    queue.add(offline("a-4", "a w"))
    assert pick_all(queue) == ["a-2", "a-3", "a-4", "b-1"]


def test_a_relative_of_a_running_request_goes_before_cold_prefixes() -> None:
    queue = queue_of(offline("hot-1", "hot a"), offline("cold-1", "cold a"))
    queue.add(offline("cold-2", "chilly a"))
    queue.take("hot-1")
    queue.take("cold-1")
    queue.add(offline("hot-2", "hot b"))
    assert pick_all(queue) == ["hot-2", "cold-2"]


def test_a_preempted_request_returns_to_its_place() -> None:
    queue = queue_of(
        offline("a-1", "a x"), offline("a-2", "a y"), offline("a-3", "a z"), offline("b-1", "b x")
    )
    assert [queue.take(rid).rid for rid in ("a-1", "a-2")] == ["a-1", "a-2"]
    queue.restore("a-1", num_generated_tokens=7)
    assert [request.rid for request in queue.candidates(0.0)] == ["a-1", "a-3", "b-1"]
    resumed = pick(queue, 0.0)
    assert resumed is not None
    assert (resumed.rid, resumed.num_generated_tokens) == ("a-1", 7)


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


def test_it_comes_next_where_the_branch_that_is_served_shares_as_much() -> None:
    queue = queue_of(
        *(offline(f"{name}-{n}", f"{name} x {n}") for name in "abc" for n in range(3)),
    )
    assert queue.take("a-0").rid == "a-0"
    queue.cached("c-1", 2)
    # Within its branch, those that wait keep their order: the cache has as much of each.
    rest = ["a-1", "a-2", "c-0", "c-1", "c-2", "b-0", "b-1", "b-2"]
    assert pick_all(queue) == rest


def test_what_all_share_is_no_reason_to_change_the_order() -> None:
    queue = queue_of(*(offline(f"r{n}", f"shared template {n}") for n in range(5)))
    queue.cached("r3", 2)
    queue.take("r0")
    queue.cached("r3", 2)
    assert pick_all(queue) == ["r1", "r2", "r3", "r4"]


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
