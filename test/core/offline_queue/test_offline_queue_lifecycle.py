"""News to the cache, and what is refused; for the order see ``test_offline_queue_machine``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from core.offline_queue.offline_requests import offline, pick, pick_all, queue_of
from sglang_coserve.core.offline_queue import OfflineQueueConfig
from sglang_coserve.errors import ConfigError, RequestError


def test_only_the_first_of_a_branch_is_news_to_the_cache() -> None:
    queue = queue_of(offline("a-1", "t a x"), offline("a-2", "t a y"), offline("b-1", "t b x"))
    queue.take("a-1")
    queue.add(offline("b-2", "t b y"))
    queue.add(offline("c-1", "t c x"))
    assert not queue.opens_branch("b-2")
    assert queue.opens_branch("c-1")


def test_changing_the_queue_under_its_candidates_is_a_bug() -> None:
    queue = queue_of(offline("a", "x"), offline("b", "y"))
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
        ("utility_ratio", 1.1),
        ("max_overtakes", -1),
        ("deadline_slack_s", math.inf),
    ],
)
def test_a_setting_out_of_range_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^offline queue: {field} must be"):
        OfflineQueueConfig(**{field: value})


def test_short_deadlines_take_half_of_the_picks_at_most() -> None:
    config = OfflineQueueConfig(utility_ratio=0.0)
    queue = queue_of(*(offline(f"line-{n}", f"l {n}") for n in range(200)), config=config)
    picks = []
    for number in range(100):
        now_s = 10.0 + number
        urgent = offline(f"urgent-{number}", f"u {number}", arrival_s=now_s, deadline_s=now_s + 9)
        queue.add(urgent)
        picks.append(pick(queue, now_s).rid.split("-")[0])
    assert picks[:4] == ["urgent", "line"] * 2
    assert picks.count("line") == 50


def test_a_deadline_that_cannot_be_met_counts_as_none() -> None:
    config = OfflineQueueConfig(utility_ratio=0.0)
    late = offline("late", "a", arrival_s=1.0, deadline_s=5.0)
    queue = queue_of(offline("old", "b"), late, config=config)
    assert queue.peek(4.0).rid == "late"
    assert queue.peek(6.0).rid == "old"
