"""Lines on engines that come, go, drain and die, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from sglang_coserve.fleet.line_placement.engines import (
    FAILURES_IN_A_ROW,
    LINES_AHEAD,
    FailureStreak,
    Rendezvous,
    line_window,
    model_of_most,
)
from sglang_coserve.fleet.line_placement.placement import (
    DEATHS_BEFORE_ALONE,
    LinePlacement,
    Placed,
    PrefixGroups,
)
from sglang_coserve.jsonl.request_line import prefix_key

ENGINES = ("a", "b", "c", "d")


def key(*texts: str) -> bytes:
    """The prefix key of a prompt of blocks: equal texts are equal blocks, without JSON's quotes."""
    blocks = "".join(text.ljust(128) for text in texts)
    return prefix_key({"prompt": blocks[1:]})[: 4 * len(texts)]


def opened(*names: str) -> LinePlacement:
    placement = LinePlacement()
    for name in names:
        assert placement.set_engine(name, window=4, is_open=True) == []
    return placement


def offered(placement: LinePlacement, lines: Sequence[tuple[str, bytes]]) -> dict[Any, str]:
    """Where each of the lines went that were placed."""
    placed: list[Placed] = []
    for name, prefix in lines:
        placed += placement.offer(name, prefix)
    return dict(placed)


def test_a_group_goes_to_one_engine_and_to_the_same_after_a_restart() -> None:
    for group in range(20):
        lines = [(f"{n}", key(f"group {group}", f"line {n}")) for n in range(4)]
        (first,) = set(offered(opened(*ENGINES), lines).values())
        (again,) = set(offered(opened(*reversed(ENGINES)), lines).values())
        assert first == again


def test_an_engine_more_or_less_moves_only_what_is_its_own() -> None:
    keys = [f"group {n}".encode() for n in range(300)]
    few, many = Rendezvous("abc"), Rendezvous("abcd")
    moved = [k for k in keys if few.choose(k) != many.choose(k)]
    assert all(many.choose(k) == "d" for k in moved)
    assert len(keys) / 8 < len(moved) < len(keys) / 2
    shares = [sum(few.choose(k) == name for k in keys) for name in "abc"]
    assert min(shares) > 60
    assert all(few.order(k)[0] == few.choose(k) for k in keys)
    assert Rendezvous(()).choose(b"any") is None


def test_a_subtree_that_is_too_large_for_one_engine_is_divided_by_what_its_lines_share() -> None:
    groups, most = PrefixGroups(), 8
    prompt = "the same system prompt"
    for n in range(most):
        assert groups.join(key(prompt, f"first {n}"), most) == key(prompt)
    joined = [
        {groups.join(key(prompt, f"document {n}", f"question {q}"), most) for q in range(most)}
        for n in range(3)
    ]
    assert joined == [{key(prompt, f"document {n}")} for n in range(3)]


def test_a_line_that_several_engines_died_of_is_served_alone_and_then_given_up() -> None:
    placement = opened("a", "b")
    others = offered(placement, [(f"{n}", key(f"{n}")) for n in range(6)])
    engine = dict(placement.offer("poison", key("poison")))["poison"]
    for _ in range(DEATHS_BEFORE_ALONE - 1):
        placed = placement.offer_again("poison", engine_died=True)
        assert placed is not None and len(placed) == 1, "it goes to another engine beside others"
    assert placement.offer_again("poison", engine_died=True) == [], "it waits for an empty engine"
    alone = [placed for name in others for placed in placement.end(name)]
    assert [placed.line for placed in alone] == ["poison"]
    kept = alone[0].engine
    assert placement.in_flight(kept) == 1
    other = {"a": "b", "b": "a"}[kept]
    more = offered(placement, [(f"more {n}", key(f"more {n}")) for n in range(8)])
    assert set(more.values()) == {other}, "it is alone"
    assert placement.offer_again("poison", engine_died=True) is None
    assert engine in ENGINES
    placed = dict(placement.end(next(iter(more))))
    assert placement.num_waiting < 4, "its engine takes lines again"


def test_windows_leave_a_few_lines_ahead_of_what_runs() -> None:
    assert line_window(0, 0) == LINES_AHEAD
    assert line_window(40, 0) == 40 + LINES_AHEAD
    assert line_window(40, 10) == 30 + LINES_AHEAD
    assert line_window(10, 500) == 1


def test_a_rolling_exchange_changes_the_model_once() -> None:
    present: str | None = None
    seen = []
    for models in (
        ["v1"] * 3,
        ["v1"] * 2,
        ["v1", "v1", "v2"],
        ["v1", "v2"],
        [],
        ["v2", "v2", "v1"],
        ["v2", "v2"],
        ["v2"] * 3,
    ):
        present = model_of_most(models, present)
        seen.append(present)
    assert seen == ["v1"] * 5 + ["v2"] * 3


def test_an_engine_that_only_fails_rests_longer_each_time() -> None:
    streak, now_s, rests_s = FailureStreak(), 0.0, []
    for _ in range(9):
        for _ in range(FAILURES_IN_A_ROW):
            assert not streak.is_resting(now_s)
            streak.failed(now_s)
        began_s = now_s
        while streak.is_resting(now_s):
            now_s += 1.0
        rests_s.append(now_s - began_s)
    assert rests_s == [5, 10, 20, 40, 80, 160, 300, 300, 300]


def test_lines_that_fail_among_others_are_no_fault_of_the_engine() -> None:
    streak = FailureStreak()
    for _ in range(50):
        for _ in range(FAILURES_IN_A_ROW - 1):
            streak.failed(0.0)
        streak.succeeded()
    assert not streak.is_resting(0.0)


class Fleet(RuleBasedStateMachine):
    """A model that knows only where each line must not be."""

    def __init__(self) -> None:
        super().__init__()
        self.placement = LinePlacement()
        self.open: dict[str, int] = {}
        self.known: set[str] = set()
        self.where: dict[int, str | None] = {}
        self.deaths: dict[int, int] = {}
        self.next = 0

    def carry_out(self, placed: Sequence[Placed]) -> None:
        for line, engine in placed:
            assert self.where[line] is None, "an engine already has it"
            assert engine in self.open, "the engine takes no lines"
            self.where[line] = engine

    def lines_of(self, engine: str) -> list[int]:
        return [line for line, where in self.where.items() if where == engine]

    @rule(name=st.sampled_from(ENGINES), window=st.integers(1, 5))
    def engine_opens(self, name: str, window: int) -> None:
        self.open[name] = window
        self.known.add(name)
        self.carry_out(self.placement.set_engine(name, window=window, is_open=True))

    @rule(name=st.sampled_from(ENGINES))
    def engine_drains(self, name: str) -> None:
        self.open.pop(name, None)
        self.known.add(name)
        self.carry_out(self.placement.set_engine(name, window=3, is_open=False))

    @rule(name=st.sampled_from(ENGINES), is_death=st.booleans())
    def engine_gives_its_lines_back(self, name: str, is_death: bool) -> None:
        self.engine_drains(name)
        for line in self.lines_of(name):
            was_alone = self.deaths[line] >= DEATHS_BEFORE_ALONE
            self.where[line] = None
            self.deaths[line] += is_death
            placed = self.placement.offer_again(line, engine_died=is_death)
            assert (placed is None) == (is_death and was_alone)
            if placed is None:
                del self.where[line]
            else:
                self.carry_out(placed)

    @precondition(lambda self: self.known - self.open.keys())
    @rule(data=st.data())
    def engine_is_forgotten(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.known - self.open.keys())))
        if not self.lines_of(name):
            self.known.remove(name)
            self.placement.remove_engine(name)

    @rule(group=st.integers(0, 3), detail=st.integers(0, 2), count=st.integers(1, 6))
    def lines_come(self, group: int, detail: int, count: int) -> None:
        for _ in range(count):
            line, self.next = self.next, self.next + 1
            self.where[line], self.deaths[line] = None, 0
            prefix = key(f"{group}", f"{detail}", f"{line}") if group else b""
            self.carry_out(self.placement.offer(line, prefix))

    @precondition(lambda self: self.where)
    @rule(data=st.data())
    def line_ends(self, data: Any) -> None:
        line = data.draw(st.sampled_from(sorted(self.where)))
        del self.where[line]
        self.carry_out(self.placement.end(line))

    @invariant()
    def counts_agree(self) -> None:
        for name in self.known:
            assert self.placement.in_flight(name) == len(self.lines_of(name))
        waiting = [line for line, where in self.where.items() if where is None]
        assert self.placement.num_waiting == len(waiting)

    @invariant()
    def suspects_are_alone(self) -> None:
        for line, engine in self.where.items():
            if engine is not None and self.deaths[line] >= DEATHS_BEFORE_ALONE:
                assert self.lines_of(engine) == [line]

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        suspects = [n for n, where in self.where.items() if self.deaths[n] >= DEATHS_BEFORE_ALONE]
        waiting = [n for n, where in self.where.items() if where is None and n not in suspects]
        if not suspects and waiting:
            for name, window in self.open.items():
                assert len(self.lines_of(name)) >= window, f"{name} has room"
        if suspects and self.open:
            in_flight = [n for n in suspects if self.where[n] is not None]
            busy = any(self.lines_of(name) for name in self.open)
            assert in_flight or busy, "a suspect waits for nothing"

    def teardown(self) -> None:
        for line in list(self.where):
            del self.where[line]
            self.carry_out(self.placement.end(line))
        assert not self.placement._groups._counts
        assert self.placement.num_waiting == 0


Fleet.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestFleet = Fleet.TestCase
