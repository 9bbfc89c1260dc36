"""Which running lines strict engines take over from relaxed ones, and which they give back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_coserve.config.coserve import Pool
from sglang_coserve.fleet.line_placement.line_moves import Move
from sglang_coserve.fleet.pools.line_pools import LinePools
from sglang_coserve.http_lines.engine_load import WantedLines

WANTS = WantedLines(tokens=100, max_tokens=400, lines=8)


def pools_of(**engines: Pool | None) -> LinePools:
    pools = LinePools()
    for name, pool in engines.items():
        pools.set_engine(name, pool, is_open=True)
    return pools


def running(pools: LinePools, engine: str, **tokens: int) -> None:
    """Lines of an engine, half of whose tokens are the prompt's."""
    for line, count in tokens.items():
        pools.start(line, engine, 0, now_s=0.0)
        pools.has_prompt(line, count - count // 2)
        pools.add_tokens(line, count // 2, now_s=0.0)


def moved(moves: list[Move]) -> dict[Any, str | None]:
    return dict(moves)


def test_a_strict_engine_gets_the_lines_that_suit_it_as_far_as_they_fit_together() -> None:
    pools = pools_of(r1="relaxed", r2="relaxed", any=None, s="strict", t="strict")
    running(pools, "r1", a=90, b=300, c=500)
    running(pools, "r2", d=120, e=10)
    running(pools, "any", f=100)
    running(pools, "s", g=100)
    assert moved(pools.look("s", WANTS, 0, 1.0)) == {"a": "s", "d": "s", "e": "s"}
    assert pools.look("s", WANTS, 0, 1.5) == [], "those are on their way"
    one = replace(WANTS, lines=1)
    assert moved(pools.look("t", one, 0, 1.5)) == {"b": "t"}
    assert pools.look("r1", None, 5, 1.5) == []


def test_what_comes_counts_until_it_runs() -> None:
    pools = pools_of(r="relaxed", s="strict")
    running(pools, "r", a=300, b=90)
    wants = WantedLines(tokens=300, max_tokens=380, lines=2)
    assert moved(pools.look("s", wants, 0, 0.0)) == {"a": "s"}
    assert pools.move_of("a") == Move("a", "s")
    pools.stop("a")
    pools.start("a", "s", 150, now_s=1.0)
    assert pools.look("s", wants, 0, 1.0) == []
    pools.has_prompt("a", 150)
    pools.add_tokens("a", 16, now_s=2.0)
    assert moved(pools.look("s", wants, 0, 2.0)) == {"b": "s"}


def test_a_line_whose_prompt_nobody_told_stays() -> None:
    pools = pools_of(r="relaxed", s="strict")
    pools.start("a", "r", 0, now_s=0.0)
    pools.add_tokens("a", 50, now_s=0.0)
    assert pools.look("s", WANTS, 0, 1.0) == []


def test_as_many_go_back_as_waited_at_two_looks_the_silent_ones_first() -> None:
    pools = pools_of(r="relaxed", s="strict")
    running(pools, "s", a=90, b=90, c=90)
    for line, now_s in (("a", 3.0), ("c", 2.0), ("b", 1.0)):
        pools.add_tokens(line, 1, now_s)
    assert pools.look("s", None, 2, 4.0) == []
    assert pools.look("s", None, 1, 4.5) == [Move("b", None)]
    assert pools.look("s", None, 1, 5.0) == [], "it is still on its way"
    pools.stop("b")
    assert pools.look("s", None, 0, 5.5) == []


def test_a_line_that_has_just_come_waits_for_its_kv_and_then_for_room() -> None:
    pools = pools_of(r="relaxed", s="strict")
    pools.start("a", "s", 50, now_s=0.0)
    for now_s in (1.0, 2.0, 9.0):
        assert pools.look("s", None, 1, now_s) == []
    assert pools.look("s", None, 1, 11.0) == [Move("a", None)]


class PoolsMachine(RuleBasedStateMachine):
    """Engines of all pools come and go; moves are carried out late or never."""

    names: dict[str, Pool | None] = {"r": "relaxed", "q": None, "s": "strict", "t": "strict"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.pools = LinePools()
        self.open: set[str] = set()
        self.where: dict[int, str] = {}
        self.prompts: dict[int, int] = {}
        self.tokens: dict[int, int] = {}
        self.silent: set[int] = set()
        self.asked: dict[int, str | None] = {}
        self.now_s = 0.0
        self.next = 0

    @rule(name=st.sampled_from(sorted(names)), is_open=st.booleans())
    def engine_changes(self, name: str, is_open: bool) -> None:
        before = {each: self.pools.begins_lines(each) for each in self.names}
        (self.open.add if is_open else self.open.discard)(name)
        told = self.pools.set_engine(name, self.names[name], is_open=is_open)
        after = {each: self.pools.begins_lines(each) for each in self.names}
        assert {each for each in after if after[each] != before[each]} <= {*told, name}

    @precondition(lambda self: self.open)
    @rule(data=st.data(), prompt=st.integers(1, 300), output=st.integers(1, 50))
    def line_runs(self, data: Any, prompt: int, output: int) -> None:
        line, self.next = self.next, self.next + 1
        self.where[line] = engine = data.draw(st.sampled_from(sorted(self.open)))
        self.pools.start(line, engine, 0, self.now_s)
        self.pools.has_prompt(line, prompt)
        self.pools.add_tokens(line, output, self.now_s)
        self.prompts[line], self.tokens[line] = prompt, prompt + output

    @precondition(lambda self: self.where)
    @rule(data=st.data(), goes_on=st.booleans())
    def attempt_ends(self, data: Any, goes_on: bool) -> None:
        line = data.draw(st.sampled_from(sorted(self.where)))
        move = self.pools.move_of(line)
        assert (move is not None) == (line in self.asked)
        if move is not None and move.to is not None:
            assert move.to in self.open, "it would wait for an engine that takes nothing"
        self.pools.stop(line)
        self.asked.pop(line, None)
        if goes_on and move is not None and move.to:
            self.where[line] = move.to
            self.silent.add(line)
            self.pools.start(line, move.to, 0, self.now_s)
            self.tokens[line] = self.prompts[line]
        else:
            del self.where[line], self.tokens[line]
            self.silent.discard(line)
            self.pools.end(line)

    @rule(
        name=st.sampled_from(sorted(names)),
        tokens=st.integers(1, 300),
        more=st.integers(0, 600),
        count=st.integers(1, 5),
        waiting=st.integers(0, 4),
        after_s=st.floats(0, 6),
    )
    def look(
        self, name: str, tokens: int, more: int, count: int, waiting: int, after_s: float
    ) -> None:
        self.now_s += after_s
        wants = WantedLines(tokens=tokens, max_tokens=tokens + more, lines=count)
        has_room = waiting == 0
        coming = [line for line, to in self.asked.items() if to == name]
        coming += [line for line in self.silent if self.where[line] == name]
        moves = self.pools.look(name, wants if has_room else None, waiting, self.now_s)
        begins = [each for each in self.open if self.names[each] != "strict"]
        if moves:
            assert name in self.open and self.names[name] == "strict" and begins
        for line, to in moves:
            assert line not in self.asked
            assert to == (name if has_room else None)
            source = self.where[line]
            assert (
                (self.names[source] == "relaxed" and source in self.open)
                if to
                else (source == name)
            )
            self.asked[line] = to
        if has_room and moves:
            together = sum(self.tokens[line] for line in {*coming, *(m.line for m in moves)})
            assert together <= wants.max_tokens
            assert len(coming) + len(moves) <= count
        assert has_room or len(moves) <= waiting

    @invariant()
    def lines_begin_at_relaxed_engines_as_long_as_there_are_any(self) -> None:
        begin = {name for name in self.open if self.names[name] != "strict"} or self.open
        assert {name for name in self.names if self.pools.begins_lines(name)} == begin


PoolsMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPools = PoolsMachine.TestCase
