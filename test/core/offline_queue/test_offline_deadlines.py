"""Requests whose deadline is at risk come first, and only those."""

from __future__ import annotations

from dataclasses import replace

from core.offline_queue.offline_requests import PREFIX_ONLY, offline, pick_all, queue_of

CONFIG = replace(PREFIX_ONLY, deadline_slack_s=60.0)


def test_a_request_comes_first_once_its_slack_is_below_the_threshold() -> None:
    queue = queue_of(
        offline("a-1", "a x"),
        offline("a-2", "a y"),
        offline("due", "due", deadline_s=1000, estimated_service_s=100),
        config=CONFIG,
    )
    assert [request.rid for request in queue.candidates(840.0)] == ["a-1", "a-2", "due"]
    assert [request.rid for request in queue.candidates(840.1)] == ["due", "a-1", "a-2"]


def test_requests_at_risk_go_in_order_of_the_latest_start() -> None:
    queue = queue_of(
        offline("none", "a"),
        offline("far", "b", deadline_s=9000),
        offline("third", "c", deadline_s=60, estimated_service_s=10),
        offline("first", "d", deadline_s=20),
        offline("second", "e", deadline_s=90, estimated_service_s=60),
        offline("second-too", "f", deadline_s=30),
        config=CONFIG,
    )
    assert pick_all(queue)[:4] == ["first", "second", "second-too", "third"]


def test_relatives_of_a_request_at_risk_come_next() -> None:
    queue = queue_of(
        offline("cold", "cold"),
        offline("due", "hot a", deadline_s=10),
        offline("relative", "hot b"),
        config=CONFIG,
    )
    assert pick_all(queue) == ["due", "relative", "cold"]


def test_progress_shortens_what_is_left_to_do() -> None:
    queue = queue_of(
        offline("cold", "cold"),
        offline("due", "hot", deadline_s=200, estimated_service_s=190),
        config=CONFIG,
    )
    assert queue.take("due").rid == "due"
    queue.restore("due", num_generated_tokens=90, estimated_service_s=10)
    queue.take("cold")
    queue.restore("cold", num_generated_tokens=0)
    assert pick_all(queue, now_s=100.0) == ["cold", "due"]
    queue.restore("due", num_generated_tokens=90)
    queue.restore("cold", num_generated_tokens=0)
    assert pick_all(queue, now_s=131.0) == ["due", "cold"]


def test_a_request_that_left_is_no_longer_urgent() -> None:
    queue = queue_of(
        offline("due-1", "a", deadline_s=1), offline("due-2", "b", deadline_s=2), config=CONFIG
    )
    queue.remove("due-1")
    assert pick_all(queue) == ["due-2"]
