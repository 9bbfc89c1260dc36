"""No request waits for ever, whatever arrives."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from core.offline_queue.offline_requests import offline, pick
from sglang_coserve.core.offline_queue import OfflineQueue, OfflineQueueConfig


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
            queue.restore(queue.running(rid))
            let_wait(rid)
        elif event == "cancel" and age:
            rid = list(age)[choice % len(age)]
            queue.remove(rid)
            del age[rid]
            if rid in running:
                running.remove(rid)
            else:
                del num_picks[rid], more_stale[rid]
