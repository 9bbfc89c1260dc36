"""Whose line is next, and that nothing is lost when somebody leaves."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.lines.fair_slots import FairSlots, JobShare


async def keep_taking(
    slots: FairSlots,
    job: JobShare,
    expected: int,
    tokens: int,
    taken: Counter[str],
    lines: int = 10_000,
) -> None:
    """Send lines one after the other; ``taken`` counts a line in flight as expected, then as it
    was."""
    slots.join(job)

    async def one_line() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    def ended(task: asyncio.Task[None]) -> None:
        used = 0 if task.cancelled() else tokens
        taken[job.owner] += used - expected
        slots.release(job, 1, expected, used)

    async with asyncio.TaskGroup() as group:
        for _ in range(lines):
            await slots.acquire(job, 1, expected)
            taken[job.owner] += expected
            group.create_task(one_line()).add_done_callback(ended)
    slots.leave(job)


batches = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(-100, 100),
        st.floats(0.0, 10.0),
        st.integers(1, 50),
        st.integers(1, 50),
    ),
    min_size=2,
    max_size=8,
)
"""Of each: the owner, priority, deadline, the tokens that a line of it is expected to take and
those that it takes."""


@given(batches=batches, max_lines=st.integers(1, 5))
async def test_owners_share_alike_whatever_their_batches_ask_for(
    batches: list[tuple[str, int, float, int, int]], max_lines: int
) -> None:
    """What owners have taken differs by one line at most while all of them wait.

    A line may take more or less than was expected of it: that much may be added for each in
    flight, and is made up for by the next ones.
    """
    slots = FairSlots(max_lines, 1000)
    taken: Counter[str] = Counter()
    senders = []
    for owner, priority, deadline_s, expected, tokens in batches:
        job = JobShare(owner, priority, deadline_s)
        sending = keep_taking(slots, job, expected, tokens, taken)
        senders.append(asyncio.create_task(sending))
    most = max(max(expected, tokens) for *_, expected, tokens in batches)
    errors = sum(
        sorted((abs(expected - tokens) for *_, expected, tokens in batches), reverse=True)[:1]
    )
    for _ in range(300):
        await asyncio.sleep(0)
        levels = [taken[owner] for owner, *_ in batches]
        assert max(levels) - min(levels) <= most + max_lines * errors
    for sender in senders:
        sender.cancel()
    await asyncio.gather(*senders, return_exceptions=True)
    assert (slots.lines_in_flight, slots.bytes_in_flight) == (0, 0)


async def test_an_owner_who_leaves_after_every_line_earns_nothing_by_it() -> None:
    slots = FairSlots(1, 1000)
    taken: Counter[str] = Counter()
    staying = JobShare("staying", 0, 0.0)
    stay = keep_taking(slots, staying, 10, 10, taken)

    async def come_and_go() -> None:
        while True:
            job = JobShare("fickle", 0, 0.0)
            slots.join(job)
            try:
                await slots.acquire(job, 1, 90)
                taken["fickle"] += 90
                slots.release(job, 1, 90, 90)
            finally:
                slots.leave(job)

    tasks = [asyncio.create_task(stay), asyncio.create_task(come_and_go())]
    while taken["staying"] < 1000:
        await asyncio.sleep(0)
    assert taken["staying"] - 10 <= taken["fickle"] <= taken["staying"] + 90
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    slots.leave(staying)
    assert not slots._owners


def order_of(jobs: dict[str, JobShare], running: JobShare) -> list[str]:
    """The order in which waiting jobs are served when slots come free one at a time."""

    async def scenario() -> list[str]:
        slots = FairSlots(1, 1000)
        slots.join(running)
        await slots.acquire(running, 1, 1)
        order: list[str] = []

        async def wait(name: str, job: JobShare) -> None:
            slots.join(job)
            await slots.acquire(job, 1, 1)
            order.append(name)
            slots.release(job, 1, 1, 1)

        waiting = [asyncio.create_task(wait(name, job)) for name, job in jobs.items()]
        await asyncio.sleep(0)
        slots.release(running, 1, 1, 1)
        await asyncio.gather(*waiting)
        return order

    return asyncio.run(scenario())


def test_the_highest_priority_goes_first_then_the_earliest_deadline() -> None:
    jobs = {
        "low": JobShare("a", -1, 1.0),
        "late": JobShare("a", 0, 20.0),
        "soon": JobShare("a", 0, 10.0),
        "high": JobShare("a", 5, 30.0),
    }
    assert order_of(jobs, JobShare("a", 0, 0.0)) == ["high", "soon", "late", "low"]


async def test_having_been_away_earns_nothing() -> None:
    slots = FairSlots(1, 1000)
    busy, away = JobShare("busy", 0, 0.0), JobShare("away", 0, 0.0)
    slots.join(away)
    slots.join(busy)
    for _ in range(100):
        await slots.acquire(busy, 1, 10)
        slots.release(busy, 1, 10, 10)
    await slots.acquire(busy, 1, 10)
    waiting = asyncio.create_task(slots.acquire(away, 1, 10))
    await asyncio.sleep(0)
    slots.release(busy, 1, 10, 10)
    await waiting
    assert slots._owners["away"].taken > 1000


async def test_a_large_line_goes_alone_and_bytes_are_bounded() -> None:
    slots = FairSlots(100, 10)
    job = JobShare("a", 0, 0.0)
    slots.join(job)
    await slots.acquire(job, 50, 1)
    waiting = asyncio.create_task(slots.acquire(job, 4, 1))
    await asyncio.sleep(0)
    assert not waiting.done()
    slots.release(job, 50, 1, 1)
    await waiting
    await slots.acquire(job, 6, 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(slots.acquire(job, 1, 1), 0.01)
    assert (slots.lines_in_flight, slots.bytes_in_flight) == (2, 10)


@given(data=st.data())
async def test_cancelled_waits_leak_nothing(data: st.DataObject) -> None:
    slots = FairSlots(2, 1000)
    jobs = [JobShare("a", 0, 0.0) for _ in range(4)]
    served = [Counter[str]() for _ in jobs]
    senders = [
        asyncio.create_task(keep_taking(slots, job, 1, 1, taken, lines=20))
        for job, taken in zip(jobs, served, strict=True)
    ]
    for sender in senders[:3]:
        for _ in range(data.draw(st.integers(0, 12))):
            await asyncio.sleep(0)
        sender.cancel()
    await asyncio.gather(*senders, return_exceptions=True)
    assert served[3]["a"] == 20
    assert (slots.lines_in_flight, slots.bytes_in_flight) == (0, 0)


async def test_a_grant_that_nobody_takes_is_given_to_the_next() -> None:
    slots = FairSlots(1, 1000)
    first, second, third = (JobShare("a", 0, 0.0) for _ in range(3))
    for job in (first, second, third):
        slots.join(job)
    await slots.acquire(first, 1, 1)
    leaving = asyncio.create_task(slots.acquire(second, 1, 1))
    staying = asyncio.create_task(slots.acquire(third, 1, 1))
    await asyncio.sleep(0)
    slots.release(first, 1, 1, 1)
    # After the slot is granted, and before the waiter has run again.
    asyncio.get_running_loop().call_soon(leaving.cancel)
    await staying
    assert leaving.cancelled()
    assert slots.lines_in_flight == 1
    assert second.lines_in_flight == 0
    slots.release(third, 1, 1, 1)
