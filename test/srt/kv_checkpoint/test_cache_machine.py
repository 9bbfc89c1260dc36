"""The cache alone, driven at random: no slot lost or shared, and always the right KV."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_coserve.srt.kv_checkpoint.strategies import Eager, Lazy, Strategy
from srt.kv_checkpoint.bare_cache import BareEngine, new_request

HEADS = ([1] * 40, [2] * 16, [3] * 3, [])
TAILS = ([4] * 5, [5] * 33, [6])


class CacheMachine(RuleBasedStateMachine):
    """Requests start, generate, are preempted, resume and end while copies come and go."""

    @initialize(
        strategy=st.one_of(
            st.builds(
                Eager,
                least_copy_tokens=st.sampled_from([1, 8]),
                step_tokens=st.just(64),
                most_in_flight_tokens=st.just(128),
            ),
            st.just(Lazy()),
        ),
        page=st.sampled_from([1, 4]),
        slots=st.sampled_from([128, 256]),
        host_slots=st.sampled_from([32, 160, 1024]),
        least=st.sampled_from([1, 16]),
    )
    def start(self, strategy: Strategy, page: int, slots: int, least: int, **pools: Any) -> None:
        self.engine = BareEngine(strategy, slots=slots, page_tokens=page, **pools)
        self.engine.cache.reclaimer.least_tokens = least
        self.waiting: list[Any] = []
        self.count = 0

    def running(self, data: st.DataObject) -> Any:
        return data.draw(st.sampled_from(self.engine.running))

    @rule(head=st.sampled_from(HEADS), tail=st.sampled_from(TAILS), offline=st.booleans())
    def arrive(self, head: list[int], tail: list[int], offline: bool) -> None:
        self.count += 1
        request = new_request(f"r{self.count}", head + tail, offline=offline)
        if not self.engine.admit(request):
            self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        if self.engine.admit(request):
            self.waiting.remove(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort_waiting(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.engine.cache.forget(request.rid)

    @precondition(lambda self: self.engine.running)
    @rule(steps=st.integers(1, 20))
    def generate(self, steps: int) -> None:
        """All requests generate; one that finds no memory is preempted."""
        for _ in range(steps):
            for request in list(self.engine.running):
                if not self.engine.decode(request):
                    self.preempt_request(request)
            self.engine.checkpoint()

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.preempt_request(self.running(data))

    def preempt_request(self, request: Any) -> None:
        self.engine.release(request)
        self.waiting.append(request)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.engine.release(self.running(data), ends=True)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), budget=st.integers(0, 64))
    def prefetch(self, data: st.DataObject, budget: int) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        tokens = self.engine.cache.prefetch_step(request, budget)
        assert (tokens or 0) <= budget

    @rule(tokens=st.integers(1, 64))
    def reclaim(self, tokens: int) -> None:
        before = self.engine.cache.evictable_size()
        assert self.engine.evict(tokens) >= min(tokens, before)

    @rule()
    def copies_end(self) -> None:
        self.engine.settle()

    @invariant()
    def everything_is_in_its_place(self) -> None:
        if hasattr(self, "engine"):
            self.engine.assert_consistent()

    def teardown(self) -> None:
        """At the end nothing is left locked."""
        if not hasattr(self, "engine"):
            return
        for request in list(self.engine.running):
            self.engine.release(request, ends=True)
        self.engine.settle()
        assert self.engine.cache.protected_size() == 0
        self.engine.assert_consistent()


def test_random_use() -> None:
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=25, stateful_step_count=30, deadline=None)
    )


@pytest.mark.heavy
def test_much_random_use() -> None:
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=1000, stateful_step_count=60, deadline=None)
    )
