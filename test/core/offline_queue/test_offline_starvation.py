"""No request waits for ever, whatever arrives."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from core.offline_queue.offline_requests import PREFIX_ONLY, offline, pick, pick_all, queue_of
from sglang_coserve.core.offline_queue import OfflineQueue, OfflineQueueConfig, QueuedRequest


def hot(number: int, now_s: float) -> QueuedRequest:
    """Build one more request with the prefix of those that run."""
    return offline(f"hot-{number}", f"hot prefix {number}", arrival_s=now_s)


@given(
    max_overtakes=st.integers(0, 3),
    utility_ratio=st.sampled_from([0.5, 1.0]),
    events=st.lists(
        st.tuples(
            st.sampled_from(["add", "add late", "pick", "pick", "preempt", "cancel"]),
            st.integers(0, 7),
        ),
        max_size=80,
    ),
)
@settings(max_examples=300, deadline=None)
def test_the_stated_bound_holds(
    max_overtakes: int, utility_ratio: float, events: list[tuple[str, int]]
) -> None:
    """Each request is among the first (a + 1)(K + 1) picks, a being those more stale."""
    queue = OfflineQueue(
        OfflineQueueConfig(
            utility_ratio=utility_ratio, max_overtakes=max_overtakes, deadline_slack_s=5.0
        )
    )
    age: dict[str, tuple[float, int]] = {}
    more_stale: dict[str, int] = {}  # of each waiting request
    num_picks: dict[str, int] = {}  # since it waits
    running: list[str] = []

    def let_wait(rid: str) -> None:
        for other in more_stale:
            more_stale[other] += age[rid] < age[other]
        more_stale[rid] = sum(age[other] < age[rid] for other in more_stale)
        num_picks[rid] = 0

    for number, (event, choice) in enumerate(events):
        now_s = float(number)
        if event in ("add", "add late"):
            rid = f"r{number}"
            arrival_s = now_s if event == "add" else now_s - 10
            deadline_s = now_s + 3 if choice > 4 else None
            queue.add(
                offline(rid, [choice % 3, choice], arrival_s=arrival_s, deadline_s=deadline_s)
            )
            age[rid] = (arrival_s, number)
            let_wait(rid)
        elif event == "pick" and (request := pick(queue, now_s)):
            for rid in num_picks:
                num_picks[rid] += 1
                assert num_picks[rid] <= (more_stale[rid] + 1) * (max_overtakes + 1) - (
                    rid != request.rid
                )
            del num_picks[request.rid], more_stale[request.rid]
            running.append(request.rid)
        elif event == "preempt" and running:
            rid = running.pop(choice % len(running))
            queue.restore(rid, num_generated_tokens=0)
            let_wait(rid)
        elif event == "cancel" and age:
            rid = list(age)[choice % len(age)]
            queue.remove(rid)
            del age[rid]
            if rid in running:
                running.remove(rid)
            else:
                del num_picks[rid], more_stale[rid]


def test_the_stated_bound_is_reached() -> None:
    """Two requests are more stale than the cold one and K = 3: it is the last of 3·4 picks."""
    queue = queue_of(hot(0, 0.0), config=replace(PREFIX_ONLY, max_overtakes=3))
    pick(queue, 0.0)
    for rid in ("old-1", "old-2", "cold"):
        queue.add(offline(rid, rid, arrival_s=1.0))
    for number in range(1, 20):
        queue.add(hot(number, 2.0))
    picks = pick_all(queue)
    assert [picks.index(rid) + 1 for rid in ("old-1", "old-2", "cold")] == [4, 8, 12]
