"""Ranks that share a clock go by rank 0's, those that do not by their own."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_coserve.srt.marks.offline_marks import marked_arrival_s
from sglang_coserve.srt.steps.clocks import RankClock, RankTime


def request(rid: str, created_s: float | None = None) -> Any:
    """A message, as far as the clock looks at it."""
    return SimpleNamespace(
        rid=rid,
        time_stats=SimpleNamespace(created_time=created_s or 0.0),
        sampling_params=SimpleNamespace(custom_params=None),
    )


class Blocker:
    """SGLang's, which holds back every request named ``held``."""

    def handle(self, received: list[Any] | None) -> list[Any] | None:
        return received and [one for one in received if one.rid != "held"]


def test_without_ticks_each_rank_goes_by_its_own_clock() -> None:
    clock, blocker = RankClock(is_shared=False, is_source=True), Blocker()
    assert clock.carried_by(blocker) is blocker
    before_s = time.perf_counter()
    now_s = clock.now_s()
    assert before_s <= now_s <= time.perf_counter()
    assert clock.arrival_s(request("a", created_s=3.0), now_s=5.0) == 3.0
    assert clock.arrival_s(request("a"), now_s=5.0) == 5.0


def test_a_tick_sets_the_time_until_the_next_one() -> None:
    clock = RankClock(is_shared=True, is_source=False)
    clock.take(RankTime(10.0))
    assert clock.now_s() == clock.now_s() == 10.0
    # What this rank knows itself of an arrival does not count.
    assert clock.arrival_s(request("a", created_s=3.0), now_s=10.0) == 10.0
    clock.take(RankTime(11.0))
    assert clock.now_s() == 11.0


def test_a_request_brings_its_arrival_along_however_late_it_is_queued() -> None:
    """Its grammar may be compiled first, or another request with its id may still be here."""
    source, follower = (RankClock(is_shared=True, is_source=first) for first in (True, False))
    blocker = source.carried_by(None)
    ranks = []
    for received in ([request("a", created_s=3.0)], []):
        tick, *sent = blocker.handle(received)
        follower.take(tick)
        ranks += sent
    (arrived,) = ranks
    assert follower.arrival_s(arrived, follower.now_s()) == 3.0


class Device:
    """What timer and pacer of a rank say of its device."""

    results_s = 3.0

    def take(self) -> tuple[float, ...]:
        return (0.5,)

    def ahead_s(self, _now_s: float) -> float:
        return 0.3


def told(clock: RankClock) -> tuple[Any, ...]:
    now = clock.read()
    return now.parts_s, now.ahead_s, now.results_s


def test_what_devices_tell_is_rank_0s() -> None:
    """Each host waits for its own device: the ranks would learn different models, and plan
    differently."""
    source, follower = (RankClock(is_shared=True, is_source=first) for first in (True, False))
    source.timer = source.pacer = Device()  # type: ignore[assignment]
    blocker = source.carried_by(None)
    for _ in range(2):
        (tick,) = blocker.handle([])
        for clock in (source, follower):
            clock.take(tick)
    for clock in (source, follower):
        assert told(clock) == ((0.5, 0.5), 0.3, 3.0)
        assert clock.read().parts_s == ()
    alone = RankClock(is_shared=False, is_source=True)
    assert told(alone) == ((), 0.0, None)
    alone.timer, alone.pacer = source.timer, source.pacer
    assert told(alone) == ((0.5,), 0.3, 3.0)


def test_rank_0_puts_a_tick_before_what_it_received() -> None:
    carried = RankClock(is_shared=True, is_source=True).carried_by(Blocker())
    first, second = request("a", created_s=1.0), request("b", created_s=2.0)
    of_a_batch, abort = SimpleNamespace(batch=[second], rid=None), SimpleNamespace(rid="a")
    tick, *rest = carried.handle([first, request("held"), of_a_batch, abort])
    assert isinstance(tick, RankTime)
    assert rest == [first, of_a_batch, abort]
    assert [marked_arrival_s(one) for one in (first, second)] == [1.0, 2.0]


@pytest.mark.parametrize("inner", [None, Blocker()], ids=["alone", "behind SGLang's"])
def test_other_ranks_add_nothing(inner: Any) -> None:
    carried = RankClock(is_shared=True, is_source=False).carried_by(inner)
    messages = [request("a")]
    assert carried.handle(messages) == messages
    assert carried.handle(None) is None
