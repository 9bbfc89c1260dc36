"""What the engine has no room for lets the others go first, and is not forgotten."""

from __future__ import annotations

from core.offline_queue.offline_requests import offline, pick_all, queue_of
from sglang_coserve.core.offline_queue import OfflineQueue


def order(queue: OfflineQueue) -> list[str]:
    queue.check_invariants()
    return [request.rid for request in queue.candidates(0.0)]


def three() -> OfflineQueue:
    return queue_of(*(offline(name, name) for name in "abc"))


def test_the_others_are_candidates_meanwhile() -> None:
    queue = three()
    queue.no_room("a")
    assert order(queue) == ["b", "c"]
    queue.no_room("b")
    assert order(queue) == ["c"]


def test_it_comes_first_again_once_another_one_is_taken() -> None:
    queue = three()
    queue.no_room("a")
    queue.take("b")
    assert order(queue) == ["a", "c"]


def test_all_are_tried_again_when_there_was_room_for_none() -> None:
    queue = three()
    for name in "abc":
        queue.no_room(name)
    assert order(queue) == ["a", "b", "c"]


def test_what_remains_is_a_candidate_when_the_others_are_gone() -> None:
    queue = three()
    queue.no_room("a")
    queue.no_room("b")
    queue.remove("c")
    assert order(queue) == ["a", "b"]
    queue.no_room("a")
    queue.remove("a")
    assert pick_all(queue) == ["b"]


def test_nothing_is_noted_of_a_request_that_does_not_wait() -> None:
    queue = three()
    queue.take("a")
    queue.no_room("a")
    queue.no_room("unknown")
    queue.restore("a", 1)
    assert sorted(order(queue)) == ["a", "b", "c"]
