"""Events, the seed, FCFS, and what is refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from core.offline_queue.offline_requests import PREFIX_ONLY, offline, pick, pick_all, queue_of
from sglang_coserve.core.offline_queue import OfflineQueue, OfflineQueueConfig, QueuedRequest
from sglang_coserve.errors import ConfigError, RequestError


def groups(num_groups: int, size: int) -> list[QueuedRequest]:
    """Build groups of relatives whose members arrive in turn."""
    return [
        offline(f"{group}-{member}", [group, group, member], arrival_s=member * num_groups + group)
        for member, group in itertools.product(range(size), range(num_groups))
    ]


def test_a_request_waits_runs_waits_again_and_leaves() -> None:
    queue = OfflineQueue(OfflineQueueConfig())

    def states() -> tuple[bool, bool, int, int]:
        queue.check_invariants()
        return "r" in queue, queue.is_running("r"), len(queue), queue.num_running

    queue.add(offline("r", "a b"))
    assert states() == (True, False, 1, 0)
    assert pick(queue, 0.0) == offline("r", "a b")
    assert states() == (False, True, 0, 1)
    restored = queue.restore("r", num_generated_tokens=3)
    assert restored == replace(offline("r", "a b"), num_generated_tokens=3)
    assert states() == (True, False, 1, 0)
    assert queue.remove("r") == restored
    assert states() == (False, False, 0, 0)


def test_an_empty_queue_has_nothing_to_pick() -> None:
    queue = OfflineQueue(OfflineQueueConfig())
    assert queue.peek(0.0) is None
    assert pick(queue, 0.0) is None
    assert list(queue.candidates(0.0)) == []


def test_fcfs_serves_by_arrival_then_by_order_of_add() -> None:
    queue = queue_of(
        offline("second", "a x", arrival_s=2),
        offline("third", "b", arrival_s=2, deadline_s=3000),
        offline("first", "a y", arrival_s=1),
        offline("fourth", "a z", arrival_s=5),
        config=OfflineQueueConfig.fcfs(),
    )
    assert pick_all(queue, now_s=9.0) == ["first", "second", "third", "fourth"]


def test_fcfs_keeps_deadlines() -> None:
    queue = queue_of(
        offline("second", "a", arrival_s=1),
        offline("first", "b", arrival_s=2, deadline_s=30),
        config=OfflineQueueConfig.fcfs(),
    )
    assert pick_all(queue, now_s=9.0) == ["first", "second"]


def test_the_same_seed_gives_the_same_order() -> None:
    def order(seed: int) -> list[str]:
        config = replace(PREFIX_ONLY, utility_ratio=0.5, seed=seed)
        return pick_all(queue_of(*groups(5, 20), config=config))

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_the_utility_ratio_is_the_share_of_picks_by_prefix() -> None:
    """Prefix picks stay in the group of the last pick, age picks go to the next group."""
    config = replace(PREFIX_ONLY, utility_ratio=0.75)
    queue = queue_of(*groups(100, 100), config=config)
    subjects = [rid.split("-")[0] for rid in pick_all(queue)[:2000]]
    num_stays = sum(a == b for a, b in itertools.pairwise(subjects))
    assert 0.72 < num_stays / 1999 < 0.78


def test_looking_changes_nothing() -> None:
    config = replace(PREFIX_ONLY, utility_ratio=0.5, max_overtakes=3)
    looked_at, left_alone = (queue_of(*groups(5, 20), config=config) for _ in range(2))
    picks = []
    for number in range(100):
        ahead = [request.rid for request in itertools.islice(looked_at.candidates(0.0), number)]
        first = looked_at.peek(0.0)
        picked = pick(looked_at, 0.0)
        assert picked is not None
        assert picked is first
        assert ahead[:1] in ([], [picked.rid])
        picks.append(picked.rid)
    assert picks == pick_all(left_alone)


def test_the_first_candidates_may_be_taken_one_by_one() -> None:
    config = replace(PREFIX_ONLY, utility_ratio=0.5, max_overtakes=3)
    scheduled, picked = (queue_of(*groups(5, 20), config=config) for _ in range(2))
    taken = []
    while len(scheduled):
        batch = [request.rid for request in itertools.islice(scheduled.candidates(0.0), 7)]
        taken += [scheduled.take(rid).rid for rid in batch]
    assert taken == pick_all(picked)


def test_changing_the_queue_under_its_candidates_is_a_bug() -> None:
    queue = queue_of(*groups(2, 2))
    candidates = queue.candidates(0.0)
    next(candidates)
    pick(queue, 0.0)
    with pytest.raises(AssertionError, match="changed under its candidates"):
        next(candidates)


@pytest.mark.parametrize("is_running", [False, True])
def test_a_rid_in_use_is_refused_and_free_again_after_removal(is_running: bool) -> None:
    queue = queue_of(offline("r", "a"))
    if is_running:
        queue.take("r")
    with pytest.raises(RequestError, match="'r' is already queued or running"):
        queue.add(offline("r", "b"))
    queue.check_invariants()
    queue.remove("r")
    queue.add(offline("r", "b"))
    assert pick_all(queue) == ["r"]


def test_an_unknown_rid_is_refused() -> None:
    queue = queue_of(offline("known", "a"))
    for call in (queue.take, queue.remove, lambda rid: queue.restore(rid, 0)):
        with pytest.raises(RequestError, match="no offline request 'unknown'"):
            call("unknown")
    assert pick_all(queue) == ["known"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": b""}, "no tokens"),
        ({"arrival_s": math.nan}, "arrival_s is nan"),
        ({"deadline_s": math.inf}, "deadline_s is inf"),
        ({"estimated_service_s": -1.0}, "estimated_service_s is -1.0"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"num_generated_tokens": -1}, "num_generated_tokens"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=rf"'r'.*{message}"):
        replace(offline("r", "a"), **changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("utility_ratio", -0.1),
        ("utility_ratio", 1.1),
        ("utility_ratio", math.nan),
        ("max_overtakes", -1),
        ("max_wait_s", -1.0),
        ("max_wait_s", math.inf),
        ("deadline_slack_s", math.nan),
    ],
)
def test_a_setting_out_of_range_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value}"):
        OfflineQueueConfig(**{field: value})
