"""Events, the seed, FCFS, and what is refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from core.offline_queue.offline_requests import PREFIX_ONLY, offline, pick, pick_all, queue_of
from sglang_coserve.core.offline_queue import OfflineQueueConfig, QueuedRequest
from sglang_coserve.errors import ConfigError, RequestError


def groups(num_groups: int, size: int) -> list[QueuedRequest]:
    """Build groups of relatives whose members arrive in turn."""
    return [
        offline(f"{group}-{member}", [group, group, member], arrival_s=member * num_groups + group)
        for member, group in itertools.product(range(size), range(num_groups))
    ]


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


@pytest.mark.parametrize(("num_others", "goes_first"), [(39, False), (12, True)])
def test_a_long_request_starts_when_it_would_end_last(num_others: int, goes_first: bool) -> None:
    """It takes 100 s. On four requests, all together take 490 s / 4, or only 220 s / 4."""
    others = [offline(f"a-{n}", f"a {n}", estimated_service_s=10.0) for n in range(num_others)]
    long = offline("long", "z", estimated_service_s=100.0)
    queue = queue_of(*others, long, config=replace(PREFIX_ONLY, longest_first=True))
    for number in range(4):
        queue.add(offline(f"running-{number}", "zz"))
        queue.take(f"running-{number}")
    assert (next(queue.candidates(0.0)).rid == "long") == goes_first


def test_only_the_first_of_a_branch_is_news_to_the_cache() -> None:
    queue = queue_of(offline("a-1", "t a x"), offline("a-2", "t a y"), offline("b-1", "t b x"))
    queue.take("a-1")
    queue.add(offline("b-2", "t b y"))
    queue.add(offline("c-1", "t c x"))
    assert not queue.opens_branch("b-2")
    assert queue.opens_branch("c-1")


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
    for call in (queue.take, queue.running, queue.remove):
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
        ("deadline_slack_s", math.inf),
        ("deadline_slack_s", math.nan),
    ],
)
def test_a_setting_out_of_range_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^offline queue: {field} must be"):
        OfflineQueueConfig(**{field: value})
