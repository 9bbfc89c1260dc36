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

from sglang_coserve.fleet.line_placement.failure_streak import FAILURES_IN_A_ROW, FailureStreak
from sglang_coserve.fleet.line_placement.model_vote import served_model
from sglang_coserve.fleet.line_placement.placement import (
    DEATHS_BEFORE_APART,
    INNOCENT_TOKENS,
    LinePlacement,
    Placed,
)
from sglang_coserve.fleet.line_placement.prefix_groups import PrefixGroups
from sglang_coserve.fleet.line_placement.rendezvous import Rendezvous
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


def dies(placement: LinePlacement, engine: str, death: object) -> list[Placed]:
    """An engine dies with all lines in it, which have begun; return the decisions."""
    lines = list(placement._engines[engine].in_flight)
    for line in lines:
        placement.began(line)
    return placement.engine_died(engine, death, lines)


def died(placement: LinePlacement, engine: str, death: object) -> tuple[list[Placed], list[Any]]:
    """The same, proven, and the engine is started again."""
    placed = dies(placement, engine, death)
    more, given_up = placement.prove(death)
    return [*placed, *more, *placement.set_engine(engine, window=4, is_open=True)], given_up


def num_deaths_until_given_up(num_lines: int, poison: int) -> int:
    """Let engines die of one of the lines; return how many died until it was given up."""
    placement, where, num_deaths = LinePlacement(), dict[Any, str](), 0

    def carry_out(placed: Sequence[Placed]) -> None:
        for line, engine in placed:
            where[line] = engine

    for name in ("a", "b"):
        carry_out(placement.set_engine(name, window=64, is_open=True))
    for line in range(num_lines):
        carry_out(placement.offer(line, b""))
    while True:
        while poison not in where:
            for line in list(where):  # The others are served meanwhile.
                del where[line]
                carry_out(placement.end(line))
        engine = where[poison]
        for line in [line for line, has_it in where.items() if has_it == engine]:
            del where[line]
        num_deaths += 1
        carry_out(dies(placement, engine, num_deaths))
        placed, given_up = placement.prove(num_deaths)
        carry_out(placed)
        assert given_up in ([], [poison]), "an innocent line is given up"
        if given_up:
            return num_deaths
        carry_out(placement.set_engine(engine, window=64, is_open=True))


def test_a_line_that_engines_die_of_is_found_by_halves_and_given_up() -> None:
    for poison in range(32):
        assert num_deaths_until_given_up(32, poison) <= DEATHS_BEFORE_APART + 6
    assert num_deaths_until_given_up(1, 0) == DEATHS_BEFORE_APART + 1


def test_a_line_that_has_brought_tokens_is_suspected_of_nothing() -> None:
    placement = opened("a")
    assert dict(placement.offer("works", key("1"))) == {"works": "a"}
    for death in range(10):
        placement.add_tokens("works", INNOCENT_TOKENS)
        placed, given_up = died(placement, "a", death)
        assert (dict(placed), given_up) == ({"works": "a"}, [])
        assert not placement.is_suspect("works")


def test_a_line_that_kills_engines_after_its_first_tokens_is_given_up() -> None:
    placement = opened("a")
    placement.offer("poison", key("1"))
    for death in range(DEATHS_BEFORE_APART + 1):
        assert not placement.add_tokens("poison", INNOCENT_TOKENS - 1)
        _, given_up = died(placement, "a", death)
    assert given_up == ["poison"]


def test_a_line_that_the_engine_did_not_have_is_suspected_of_nothing() -> None:
    placement = opened("a")
    placement.offer("sent", key("1"))
    for death in range(10):
        placement.engine_died("a", death, ["sent"])
        placement.prove(death)
        assert dict(placement.set_engine("a", window=4, is_open=True)) == {"sent": "a"}


def test_a_suspect_that_brings_tokens_makes_its_engine_free_for_others() -> None:
    placement = opened("a")
    placement.offer("slow", key("1"))
    for death in range(DEATHS_BEFORE_APART):
        placed, _ = died(placement, "a", death)
    assert dict(placed) == {"slow": "a"} and placement.is_suspect("slow")
    assert placement.offer("other", key("2")) == []
    assert dict(placement.add_tokens("slow", INNOCENT_TOKENS)) == {"other": "a"}


def test_a_line_waits_until_its_deaths_are_proven_or_withdrawn() -> None:
    """So no line is given up because connections broke, and none kills every engine meanwhile."""
    placement = opened("a", "b", "c")
    where = dict(placement.offer("line", key("1")))["line"]
    for death in range(DEATHS_BEFORE_APART):
        assert where is not None, "it goes on at once, but for the last"
        where = dict(dies(placement, where, death)).get("line")
    assert where is None
    assert not placement.is_suspect("line")
    assert [placed.line for placed in placement.withdraw(0)] == ["line"]


def test_suspects_whose_engine_was_not_dead_go_on() -> None:
    placement = opened("a", "b")
    for name in ("x", "y"):
        placement.offer(name, key("1"))
    for death in range(DEATHS_BEFORE_APART):
        (where,) = {line.engine.name for line in placement._lines.values() if line.engine}
        placed, _ = died(placement, where, death)
    (first,) = placed
    (second,) = dies(placement, first.engine, "not one")
    assert placement.withdraw("not one") == []
    assert dict(placement.end(second.line)) == {first.line: second.engine}
    assert placement.is_suspect(first.line)


def test_suspects_without_an_engine_that_has_the_models_of_all_are_served_one_by_one() -> None:
    placement = LinePlacement()
    placement.set_engine("c", window=4, is_open=True, models=("a", "b"))
    placed = [*placement.offer("for a", key("1"), "a"), *placement.offer("for b", key("1"), "b")]
    assert dict(placed) == {"for a": "c", "for b": "c"}
    for death in range(DEATHS_BEFORE_APART):
        placement.set_engine("c", window=4, is_open=True, models=("a", "b"))
        dies(placement, "c", death)
        placement.prove(death)
    placed = placement.set_engine("a", window=4, is_open=True, models=("a",))
    placed += placement.set_engine("b", window=4, is_open=True, models=("b",))
    assert placed == [("for a", "a")], "one after the other"
    assert placement.end("for a") == [("for b", "b")]


def test_lines_wait_for_an_engine_that_has_what_they_ask_for() -> None:
    placement = opened("a", "b")
    assert placement.offer("1", key("1"), "sql") == []
    assert len(placement.offer("2", key("2"))) == 1
    placed = placement.set_engine("b", window=4, is_open=True, models=("base", "sql"))
    assert placed == [("1", "b")]
    full = offered(placement, [(f"{n}", key("x")) for n in range(3, 12)])
    assert sorted(full.values()).count("a") <= 4


def test_a_rolling_exchange_changes_the_model_once_and_an_outage_or_a_canary_never() -> None:
    present: str | None = None
    seen = []
    for models in (
        ["v1", None, None],
        ["v1"] * 3,
        ["v1", "v1", "v2"],  # Engines that are down count with what they had.
        ["v1", "v2", "v2"],
        ["v2"] * 3,
        [None, None, None],
        ["v1", "v2"],
        ["v3"],
        [],
    ):
        present = served_model(models, present)
        seen.append(present)
    assert seen == ["v1"] * 3 + ["v2"] * 4 + ["v3"] * 2


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


MODELS = st.sets(st.sampled_from("xy")).map(sorted).map(tuple)


class Fleet(RuleBasedStateMachine):
    """A model that knows only where each line must not be."""

    def __init__(self) -> None:
        super().__init__()
        self.placement = LinePlacement()
        self.open: dict[str, int] = {}
        self.known: set[str] = set()
        self.where: dict[int, str | None] = {}
        self.asked: dict[int, str | None] = {}
        self.models: dict[str, tuple[str, ...]] = {}
        self.next = 0
        self.num_deaths = 0
        self.unproven: dict[int, list[int]] = {}

    def carry_out(self, placed: Sequence[Placed]) -> None:
        for line, engine in placed:
            assert self.where[line] is None, "an engine already has it"
            assert engine in self.open, "the engine takes no lines"
            asked = self.asked[line]
            assert asked is None or asked in self.models[engine], "the engine has no such model"
            self.where[line] = engine

    def lines_of(self, engine: str) -> list[int]:
        return [line for line, where in self.where.items() if where == engine]

    @rule(name=st.sampled_from(ENGINES), window=st.integers(1, 5), models=MODELS)
    def engine_opens(self, name: str, window: int, models: tuple[str, ...]) -> None:
        self.open[name], self.models[name] = window, models
        self.known.add(name)
        self.carry_out(self.placement.set_engine(name, window=window, is_open=True, models=models))

    @rule(name=st.sampled_from(ENGINES))
    def engine_drains(self, name: str) -> None:
        self.open.pop(name, None)
        self.known.add(name)
        self.models.setdefault(name, ())
        models = self.models[name]
        self.carry_out(self.placement.set_engine(name, window=3, is_open=False, models=models))

    @rule(name=st.sampled_from(ENGINES))
    def engine_gives_its_lines_back(self, name: str) -> None:
        self.engine_drains(name)
        for line in self.lines_of(name):
            self.where[line] = None
            self.carry_out(self.placement.offer_again(line))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def engine_seems_to_die(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        self.open.pop(name, None)
        lines = [line for line in self.lines_of(name) if data.draw(st.booleans())]
        for line in lines:
            if data.draw(st.booleans()):
                self.placement.began(line)
            self.where[line] = None
        self.num_deaths += 1
        self.unproven[self.num_deaths] = lines
        self.carry_out(self.placement.engine_died(name, self.num_deaths, lines))

    @precondition(lambda self: self.unproven)
    @rule(data=st.data())
    def engine_was_dead(self, data: Any) -> None:
        death = data.draw(st.sampled_from(sorted(self.unproven)))
        lines = self.unproven.pop(death)
        placed, given_up = self.placement.prove(death)
        assert len(given_up) <= 1
        for line in given_up:
            assert line in lines
            del self.where[line]
        self.carry_out(placed)

    @precondition(lambda self: self.unproven)
    @rule(data=st.data())
    def engine_was_not_dead(self, data: Any) -> None:
        death = data.draw(st.sampled_from(sorted(self.unproven)))
        del self.unproven[death]
        self.carry_out(self.placement.withdraw(death))

    @precondition(lambda self: any(self.where.values()))
    @rule(data=st.data())
    def line_brings_tokens(self, data: Any) -> None:
        tokens = data.draw(st.integers(1, 2 * INNOCENT_TOKENS))
        running = sorted(line for line, where in self.where.items() if where)
        line = data.draw(st.sampled_from(running))
        self.carry_out(self.placement.add_tokens(line, tokens))
        assert tokens < INNOCENT_TOKENS or not self.placement.is_suspect(line)

    @precondition(lambda self: self.known - self.open.keys())
    @rule(data=st.data())
    def engine_is_forgotten(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.known - self.open.keys())))
        if not self.lines_of(name):
            self.known.remove(name)
            self.placement.remove_engine(name)

    @rule(
        group=st.integers(0, 3),
        detail=st.integers(0, 2),
        count=st.integers(1, 6),
        asked=st.sampled_from((None, None, "x", "y")),
    )
    def lines_come(self, group: int, detail: int, count: int, asked: str | None) -> None:
        for _ in range(count):
            line, self.next = self.next, self.next + 1
            self.where[line], self.asked[line] = None, asked
            prefix = key(f"{group}", f"{detail}", f"{line}") if group else b""
            self.carry_out(self.placement.offer(line, prefix, asked))

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
    def suspects_are_apart(self) -> None:
        engines = self.placement._engines
        for line, name in self.where.items():
            if name is not None and self.placement.is_suspect(line) and name in self.open:
                suspects = self.placement._lines[line].suspects
                assert suspects is not None and suspects.engine is engines[name]

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        of = self.placement._lines
        suspects = [line for line in self.where if self.placement.is_suspect(line)]
        doubtful = [n for n in self.where if of[n].deaths & self.unproven.keys()]
        waiting = [n for n, where in self.where.items() if where is None]
        reserved = {e.name for e in self.placement._engines.values() if e.suspects is not None}
        assert bool(reserved) <= bool(suspects) and len(reserved) <= 1
        for name, window in self.open.items():
            able = [n for n in waiting if self.asked[n] in (None, *self.models[name])]
            if set(able) - {*suspects, *doubtful} and name not in reserved:
                assert len(self.lines_of(name)) >= window, f"{name} has room"
        tried = [n for each in self.placement._tried for n in (line.name for line in each.lines)]
        ready = set(suspects) - set(tried)
        able = [
            n for n in ready if any(self.asked[n] in (None, *self.models[e]) for e in self.open)
        ]
        if able and not any(self.where[n] for n in suspects):
            assert reserved and any(map(self.lines_of, reserved)), "suspects wait for nothing"

    def teardown(self) -> None:
        for line in list(self.where):
            del self.where[line]
            self.carry_out(self.placement.end(line))
        assert not self.placement._groups._counts
        assert self.placement.num_waiting == 0


Fleet.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestFleet = Fleet.TestCase
