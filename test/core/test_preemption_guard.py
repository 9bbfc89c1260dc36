"""Aborts cost a bounded share of time, and no request is aborted for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_coserve.core.preemption_guard import GuardConfig, PreemptionGuard
from sglang_coserve.core.token_bucket import TokenBucket
from sglang_coserve.errors import ConfigError

CONFIG = GuardConfig(max_aborts_in_a_row=2, wasted_share=0.1, burst_s=1.0)


def test_a_request_that_lost_its_iterations_protects_the_next_batch() -> None:
    guard = PreemptionGuard(CONFIG)
    assert not guard.protects(["a", "b"])
    guard.aborted(["a"], 0.0, 0.01)
    assert not guard.protects(["a", "b"])
    guard.aborted(["a", "b"], 0.1, 0.01)
    assert guard.protects(["a", "c"])
    assert not guard.protects(["b", "c"])


def test_an_iteration_that_ends_clears_the_count() -> None:
    guard = PreemptionGuard(CONFIG)
    for now_s in (0.0, 0.1):
        guard.aborted(["a", "b"], now_s, 0.01)
    guard.completed(["a"])
    assert not guard.protects(["a"])
    assert guard.protects(["b"])
    guard.forget("b")
    assert not guard.protects(["b"])


def test_a_burst_is_paid_for_by_time_without_aborts() -> None:
    guard = PreemptionGuard(CONFIG)
    for number in range(3):
        assert guard.can_afford(float(number))
        guard.aborted([f"r{number}"], float(number), 0.5)
    # Of the 1.5 s wasted by now 1 s was free, and 0.2 s have come back.
    assert not guard.can_afford(2.0)
    assert not guard.can_afford(4.9)
    assert guard.can_afford(5.1)


@pytest.mark.parametrize(
    "values", [{"max_aborts_in_a_row": 0}, {"wasted_share": 0.0}, {"burst_s": 0.0}]
)
def test_values_out_of_range_are_named(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        GuardConfig(**values)  # type: ignore[arg-type]


@given(
    steps=st.lists(st.tuples(st.floats(-1, 10), st.floats(0, 3)), max_size=30),
    rate=st.floats(0.01, 2),
    capacity=st.floats(0.1, 5),
)
def test_a_bucket_never_holds_more_than_its_capacity_nor_gives_more_than_came_in(
    steps: list[tuple[float, float]], rate: float, capacity: float
) -> None:
    bucket = TokenBucket(rate=rate, capacity=capacity)
    now_s = latest_s = 0.0
    bucket.take(0.0, now_s)
    taken = 0.0
    for step_s, amount in steps:
        now_s += step_s
        latest_s = max(latest_s, now_s)
        bucket.take(amount, now_s)
        taken += amount
        level = bucket.level(now_s)
        assert level <= capacity
        assert taken + level <= capacity + rate * latest_s + 1e-9


class GuardedEngine(RuleBasedStateMachine):
    """Runs iterations of random length; aborts whatever the guard lets it abort."""

    config = GuardConfig(max_aborts_in_a_row=3, wasted_share=0.2, burst_s=0.5)

    def __init__(self) -> None:
        super().__init__()
        self.guard = PreemptionGuard(self.config)
        self.now_s = 100.0
        self.start_s = self.now_s
        self.wasted_s = 0.0
        self.longest_s = 0.0
        self.in_a_row: dict[str, int] = {}

    @rule(seconds=st.floats(0, 5))
    def idle(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(
        seconds=st.floats(0.001, 2),
        rids=st.sets(st.sampled_from("abcdef"), min_size=1),
        wants_abort=st.booleans(),
    )
    def iterate(self, seconds: float, rids: set[str], wants_abort: bool) -> None:
        may_abort = self.guard.can_afford(self.now_s) and not self.guard.protects(rids)
        self.now_s += seconds
        if wants_abort and may_abort:
            self.guard.aborted(rids, self.now_s, seconds)
            self.wasted_s += seconds
            self.longest_s = max(self.longest_s, seconds)
            for rid in rids:
                self.in_a_row[rid] = self.in_a_row.get(rid, 0) + 1
        else:
            self.guard.completed(rids)
            for rid in rids:
                self.in_a_row.pop(rid, None)

    @precondition(lambda self: self.in_a_row)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.in_a_row)))
        self.guard.forget(rid)
        del self.in_a_row[rid]

    @invariant()
    def waste_is_bounded(self) -> None:
        passed_s = self.now_s - self.start_s
        bound_s = self.config.wasted_share * passed_s + self.config.burst_s + self.longest_s
        assert self.wasted_s <= bound_s + 1e-9

    @invariant()
    def nobody_starves(self) -> None:
        assert all(count <= self.config.max_aborts_in_a_row for count in self.in_a_row.values())


TestGuardedEngine = GuardedEngine.TestCase


def test_to_look_into_a_bucket_changes_nothing() -> None:
    bucket = TokenBucket(rate=1.0, capacity=2.0)
    bucket.take(3.0, 10.0)
    assert [bucket.level(now_s) for now_s in (10.5, 12.0, 99.0, 10.5)] == [-0.5, 1.0, 2.0, -0.5]
