"""What would run on alone in the end starts in time, and only that."""

from __future__ import annotations

from dataclasses import replace

from core.offline_queue.offline_requests import PREFIX_ONLY, offline, pick_all, queue_of
from sglang_coserve.core.offline_queue import OfflineQueue

CONFIG = replace(PREFIX_ONLY, longest_first=True)


def with_running(queue: OfflineQueue, count: int) -> OfflineQueue:
    """Let ``count`` requests run beside those that wait."""
    for number in range(count):
        queue.add(offline(f"running-{number}", "zz"))
        queue.take(f"running-{number}")
    return queue


def short_ones(count: int) -> list[str]:
    return [f"a-{number:02d}" for number in range(count)]


def queue_with(num_short: int, long_s: float, num_running: int) -> OfflineQueue:
    """Requests of 10 s with a common beginning, a long one that shares nothing, and requests."""
    waiting = [offline(rid, f"a {rid}", estimated_service_s=10.0) for rid in short_ones(num_short)]
    long = offline("long", "z", estimated_service_s=long_s)
    return with_running(queue_of(*waiting, long, config=CONFIG), num_running)


def test_a_long_request_waits_while_the_others_take_longer() -> None:
    """39 short ones and the long one take 490 s on four requests, which is more than 100 s."""
    queue = queue_with(39, 100.0, num_running=4)
    first = next(queue.candidates(0.0))
    assert first.rid != "long"


def test_a_long_request_starts_when_it_would_end_last() -> None:
    """Of 13 requests on four requests: (120 s + 100 s) / 4 is less than 100 s."""
    assert next(queue_with(12, 100.0, num_running=4).candidates(0.0)).rid == "long"


def test_requests_of_one_length_stay_in_their_order() -> None:
    queue = queue_with(12, 10.0, num_running=20)
    rids = pick_all(queue)
    assert [rid for rid in rids if rid != "long"] == short_ones(12)


def test_a_deadline_goes_before_length() -> None:
    queue = queue_with(12, 100.0, num_running=4)
    queue.add(offline("due", "y", deadline_s=5.0, estimated_service_s=1.0))
    config = replace(CONFIG, deadline_slack_s=60.0)
    urgent = queue_of(*(queue.take(rid) for rid in ["due", "long", *short_ones(12)]), config=config)
    assert pick_all(with_running(urgent, 4))[:2] == ["due", "long"]
