"""Whose line is next, and that nothing is lost when somebody leaves."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from functools import partial
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.lines.fair_slots import FairSlots, Grant, JobShare


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

    def ended(grant: Grant, task: asyncio.Task[None]) -> None:
        used = 0 if task.cancelled() else tokens
        taken[job.owner] += used - expected
        slots.release(grant, used)

    async with asyncio.TaskGroup() as group:
        for _ in range(lines):
            grant = await slots.acquire(job, 1, expected)
            taken[job.owner] += expected
            group.create_task(one_line()).add_done_callback(partial(ended, grant))
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
                grant = await slots.acquire(job, 1, 90)
                taken["fickle"] += 90
                slots.release(grant, 90)
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
        held = await slots.acquire(running, 1, 1)
        order: list[str] = []

        async def wait(name: str, job: JobShare) -> None:
            slots.join(job)
            grant = await slots.acquire(job, 1, 1)
            order.append(name)
            slots.release(grant, 1)

        waiting = [asyncio.create_task(wait(name, job)) for name, job in jobs.items()]
        await asyncio.sleep(0)
        slots.release(held, 1)
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
        slots.release(await slots.acquire(busy, 1, 10), 10)
    grant = await slots.acquire(busy, 1, 10)
    waiting = asyncio.create_task(slots.acquire(away, 1, 10))
    await asyncio.sleep(0)
    slots.release(grant, 10)
    await waiting
    assert slots._owners["away"].counter > 1000


async def test_a_large_line_goes_alone_and_bytes_are_bounded() -> None:
    slots = FairSlots(100, 10)
    job = JobShare("a", 0, 0.0)
    slots.join(job)
    large = await slots.acquire(job, 50, 1)
    waiting = asyncio.create_task(slots.acquire(job, 4, 1))
    await asyncio.sleep(0)
    assert not waiting.done()
    slots.release(large, 1)
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
    grant = await slots.acquire(first, 1, 1)
    leaving = asyncio.create_task(slots.acquire(second, 1, 1))
    staying = asyncio.create_task(slots.acquire(third, 1, 1))
    await asyncio.sleep(0)
    slots.release(grant, 1)
    # After the slot is granted, and before the waiter has run again.
    asyncio.get_running_loop().call_soon(leaving.cancel)
    last = await staying
    assert leaving.cancelled()
    assert slots.lines_in_flight == 1
    assert second.lines_in_flight == 0
    slots.release(last, 1)


class Pot:
    """A pot of 64 lines and 64 bytes: a part has 4 of each."""

    def __init__(self, max_lines: int = 64, max_bytes: int = 64) -> None:
        self.slots = FairSlots(max_lines, max_bytes)
        self.waiting: list[asyncio.Task[Grant]] = []

    async def ask(self, owner: str, size_bytes: int, lines: int = 1) -> list[asyncio.Task[Grant]]:
        """Ask for slots of as many jobs, one line each; return once all are granted that can be."""
        asked = []
        for _ in range(lines):
            job = JobShare(owner, 0, 0.0)
            self.slots.join(job)
            asked.append(asyncio.create_task(self.slots.acquire(job, size_bytes, 1)))
        self.waiting += asked
        await self.settled()
        return asked

    async def settled(self) -> None:
        """Wait until no slot that is free is left to be granted."""
        await asyncio.sleep(0)
        while self.slots._is_granting:
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def release(self, *granted: asyncio.Task[Grant]) -> None:
        for each in granted:
            self.slots.release(each.result(), 1)
        await self.settled()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for each in self.waiting:
            each.cancel()
        await asyncio.gather(*self.waiting, return_exceptions=True)


def granted(asked: list[asyncio.Task[Grant]]) -> int:
    return sum(each.done() for each in asked)


async def test_a_line_that_takes_all_bytes_holds_nobody_elses() -> None:
    async with Pot() as pot:
        large = await pot.ask("a", 64)
        assert granted(large) == 1
        assert granted(await pot.ask("a", 1)) == 0
        for owner in "bcd":
            assert granted(await pot.ask(owner, 1, lines=10)) == 4


async def test_lines_of_one_owner_that_take_all_slots_hold_nobody_elses() -> None:
    async with Pot() as pot:
        many = await pot.ask("a", 0, lines=100)
        assert granted(many) == 64
        few = await pot.ask("b", 0, lines=10)
        assert granted(few) == 4
        await pot.release(*many[:3])
        # The rest is shared by tokens, and the newcomer has taken fewer.
        assert (granted(many), granted(few)) == (64, 7)


async def test_a_large_line_gets_its_turn_beside_others_that_go_on() -> None:
    async with Pot() as pot:
        first = await pot.ask("a", 32, lines=2)
        large = await pot.ask("b", 50)
        assert (granted(first), granted(large)) == (2, 0)
        small = await pot.ask("c", 1, lines=200)
        assert granted(small) == 4
        await pot.release(first[0])
        assert granted(large) == 0
        assert granted(small) == 4, "nobody overtakes, but in a part"
        await pot.release(first[1])
        assert granted(large) == 1


async def test_all_parts_together_are_as_large_as_the_pot() -> None:
    async with Pot() as pot:
        await pot.ask("a", 1, lines=64)
        asked = [await pot.ask(f"b{n}", 1, lines=10) for n in range(40)]
        assert pot.slots.lines_in_flight == pot.slots.bytes_in_flight == 128
        assert sum(map(granted, asked)) == 64


async def test_a_pot_that_grows_or_that_is_no_longer_held_goes_on() -> None:
    async with Pot(2, 64) as pot:
        asked = await pot.ask("a", 1, lines=5)
        assert granted(asked) == 2
        pot.slots.resize(4, 3)
        await pot.settled()
        assert granted(asked) == 3
        pot.slots.hold({"a": "why"})
        pot.slots.resize(10, 10)
        await pot.settled()
        assert granted(asked) == 3
        others = await pot.ask("b", 1, lines=2)
        assert granted(others) == 2
        pot.slots.hold({})
        await pot.settled()
        assert granted(asked) == 5


class Turns:
    """A pot of 32 lines, which all owners want; a line of 100 tokens ends after one turn."""

    def __init__(self, max_lines: int = 32, max_bytes: int = 1 << 30) -> None:
        self.slots = FairSlots(max_lines, max_bytes)
        self.ended: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []
        self._in_flight: list[tuple[int, Grant, int]] = []
        self._now = 0

    def add(
        self,
        owner: str,
        size_bytes: int = 1,
        turns: int = 1,
        tokens: int = 100,
        expected: int | None = None,
        asks_late: bool = False,
    ) -> None:
        """Add an owner who sends such lines without end; ``expected`` tokens, if not as many.

        Lines may end before one who ``asks_late`` asks for its next slot.
        """

        async def send() -> None:
            job = JobShare(owner, 0, 0.0)
            self.slots.join(job)
            try:
                while True:
                    grant = await self.slots.acquire(job, size_bytes, expected or tokens)
                    self._in_flight.append((self._now + turns, grant, tokens))
                    if asks_late:
                        await asyncio.sleep(0)
                        await asyncio.sleep(0)
            finally:
                self.slots.leave(job)

        self._tasks.append(asyncio.create_task(send()))

    async def go(self, turns: int) -> Counter[str]:
        """Let turns pass; return how many lines ended in them, by owner."""
        before = self.ended.copy()
        for _ in range(turns):
            await self._settle()
            self._now += 1
            running, self._in_flight = self._in_flight, []
            for end, grant, tokens in running:
                if end > self._now:
                    self._in_flight.append((end, grant, tokens))
                else:
                    self.slots.release(grant, tokens)
                    await asyncio.sleep(0)
                    self.ended[grant.job.owner] += 1
        return self.ended - before

    async def _settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            while self.slots._is_granting:
                await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for each in self._tasks:
            each.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_nobody_gets_more_beside_an_owner_who_is_held_or_after_a_hold() -> None:
    async with Turns() as pot:
        pot.add("always")
        pot.add("held")
        await pot.go(5)
        pot.slots.hold({"held": "quota"})
        await pot.go(500)
        pot.add("new")
        got = await pot.go(100)
        assert got["new"] == pytest.approx(got["always"], abs=64)
        pot.slots.hold({})
        got = await pot.go(99)
        for owner in ("always", "held", "new"):
            assert got[owner] == pytest.approx(32 * 99 / 3, abs=64)


async def test_an_owner_with_one_long_line_lowers_nobodys_level_nor_its_own() -> None:
    async with Turns() as pot:
        pot.add("always")
        job = JobShare("straggler", 0, 0.0)
        pot.slots.join(job)
        await pot.slots.acquire(job, 1, 100)
        await pot.go(500)
        pot.add("new")
        got = await pot.go(100)
        assert got["new"] == pytest.approx(got["always"], abs=64)
        pot.add("straggler")
        got = await pot.go(99)
        for owner in ("always", "straggler", "new"):
            assert got[owner] == pytest.approx(31 * 99 / 3, abs=64)


async def test_wrong_estimates_cost_nothing_where_lines_end_before_the_next_is_asked_for() -> None:
    async def lines_beside_another(expected: int) -> int:
        async with Turns() as pot:
            pot.add("other", turns=7)
            pot.add("late", turns=7, expected=expected, asks_late=True)
            await pot.go(700)
            return (await pot.go(700))["late"]

    assert await lines_beside_another(4000) >= await lines_beside_another(100)


async def test_lines_of_many_bytes_leave_others_their_share_of_the_pot() -> None:
    async with Turns(128, 128 * 128) as pot:
        pot.add("small", 100, turns=5)
        alone = await pot.go(100)
        pot.add("large", 32 * 128, turns=5)
        await pot.go(50)
        beside = await pot.go(100)
    assert beside["small"] > 0.4 * alone["small"]
    assert beside["large"] * 32 > 0.4 * alone["small"]


async def test_tokens_alone_count_where_bytes_are_no_more_than_the_tokens() -> None:
    async with Turns(128, 128 * 128) as pot:
        pot.add("short", 1, turns=5)
        pot.add("long", 512, turns=5, tokens=1000)
        await pot.go(500)
        got = await pot.go(1000)
    assert got["short"] * 100 == pytest.approx(got["long"] * 1000, rel=0.1)


async def test_former_owners_are_forgotten_beside_an_owner_who_is_held() -> None:
    async with Turns() as pot:
        pot.add("always")
        pot.add("held")
        await pot.go(5)
        pot.slots.hold({"held": "quota"})
        for number in range(300):
            asking = asyncio.create_task(one_line(pot.slots, f"former-{number}"))
            await pot.go(2)
            await asking
        assert len(pot.slots._owners) < 10


async def one_line(slots: FairSlots, owner: str) -> None:
    async with slots.one(JobShare(owner, 0, 0.0), 100):
        pass


async def test_a_line_costs_the_same_beside_any_number_of_jobs() -> None:
    """Responses in the background are jobs, too: there may be thousands."""

    async def calls(count: int, owners: int) -> int:
        slots = FairSlots(1, 1000)

        async def send(number: int, lines: int) -> None:
            job = JobShare(str(number % owners), 0, float(number))
            slots.join(job)
            try:
                for _ in range(lines):
                    slots.release(await slots.acquire(job, 1, 1), 1)
            finally:
                slots.leave(job)

        tasks = [asyncio.create_task(send(n, 10_000)) for n in range(count)]
        for _ in range(2 * count):
            await asyncio.sleep(0)
        events: Counter[str] = Counter()
        before = sys.getprofile()
        sys.setprofile(lambda _frame, event, _arg: events.update([event]))
        try:
            for _ in range(400):
                await asyncio.sleep(0)
        finally:
            sys.setprofile(before)
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not slots._owners
        return events["call"] + events["c_call"]

    for owners in (1, 1000):
        assert await calls(1000, owners) < 1.5 * await calls(10, owners)
