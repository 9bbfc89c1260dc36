"""The KV of online requests alone: who fits, what stays cached, and for how long it should."""

from __future__ import annotations

import math
from dataclasses import dataclass

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

from core.test_prefix_tree import heads_of
from sglang_coserve.core.control.shadow_kv import UNPROTECTED, ShadowKv
from sglang_coserve.core.offline_queue import PackedTokens, pack_tokens
from sglang_coserve.core.offline_queue.request import TOKEN_BYTES
from sglang_coserve.core.prefix_tree import Node

PAGE = 2


@dataclass(eq=False)
class Shadowed:
    """A request as the baseline has it."""

    prompt_left_tokens: int
    token_ids: bytes
    context_tokens: int = 0
    lock: Node | None = None


def request(*token_ids: int) -> Shadowed:
    return Shadowed(len(token_ids), pack_tokens(token_ids))


def serve(kv: ShadowKv, served: Shadowed, now_s: float, *, seconds: float = 0.0) -> int:
    """Serve a request from ``now_s`` on; return how many tokens it found in the cache."""
    assert kv.begin(served, now_s, must_fit=False)
    found = served.context_tokens
    served.context_tokens += served.prompt_left_tokens
    served.prompt_left_tokens = 0
    kv.share(served)
    kv.release(served, now_s + seconds)
    return found


# --- Any traffic, against a naive model ---------------------------------------------------


@dataclass(eq=False)
class Running:
    """A request of the model."""

    prompt: PackedTokens
    request: Shadowed
    locked_tokens: int
    """Tokens of its path that are in the tree."""

    generated_tokens: int = 0


class Shadow(RuleBasedStateMachine):
    """Requests begin, are computed and end; the model has the rank of each cached page.

    A page is named by the prefix that ends with it.
    """

    @initialize(capacity=st.integers(10, 60), keeps=st.sampled_from([True, True, True, False]))
    def start(self, capacity: int, keeps: bool) -> None:
        self.now_s = 0.0
        self.capacity, self.keeps = capacity, keeps
        self.kv = ShadowKv(capacity, PAGE, keeps_prefixes=keeps)
        self.running: list[Running] = []
        self.pages: dict[PackedTokens, float] = {}
        self.reuses_s: list[float] = []
        """One for each reused token."""

        self.num_new = 0
        self.lease_s = 0.0
        self.unvouched_tokens = 0
        """Prompt tokens, less 16 for each reused token; at least 0 after each request."""

        self.first_s = math.inf
        self.prompt_tokens = self.cached_tokens = 0

    def path(self, one: Running) -> list[PackedTokens]:
        return heads_of(PackedTokens(one.request.token_ids[: one.locked_tokens * TOKEN_BYTES]))

    def locked(self) -> set[PackedTokens]:
        return {page for one in self.running for page in self.path(one)}

    def own_tokens(self) -> int:
        """Tokens that each request has for itself."""
        return sum(
            one.request.context_tokens + one.request.prompt_left_tokens - one.locked_tokens
            for one in self.running
        )

    @rule(seconds=st.floats(0.0, 200.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=24), known=st.booleans())
    def begin(self, ids: list[int], known: bool) -> None:
        prompt = pack_tokens(ids if known else ())
        one = Running(prompt, Shadowed(len(ids), prompt), 0)
        cached = [page for page in heads_of(prompt) if page in self.pages]
        found = min(PAGE * len(cached), (len(ids) - 1) // PAGE * PAGE) if self.keeps else 0
        cached = cached[: found // PAGE]
        free = self.capacity - self.own_tokens() - PAGE * len(self.locked() | set(cached))
        fits = len(ids) - found <= free
        self.first_s = min(self.first_s, self.now_s)
        assert self.kv.begin(one.request, self.now_s, must_fit=bool(self.running)) == (
            fits or not self.running
        )
        if one.request.lock is None:
            assert (one.request.context_tokens, one.request.prompt_left_tokens) == (0, len(ids))
            return
        assert one.request.context_tokens == found
        assert one.request.prompt_left_tokens == len(ids) - found
        self.prompt_tokens += len(ids)
        self.cached_tokens += found
        idle = [page for page in cached if page not in self.locked()]
        vouched_tokens = 16 * PAGE * len(idle)
        self.unvouched_tokens = max(self.unvouched_tokens + len(ids) - vouched_tokens, 0)
        self.learn(idle)
        one.locked_tokens = found
        self.running.append(one)
        self.forget_evicted()

    def learn(self, idle: list[PackedTokens]) -> None:
        for page in idle:
            self.reuses_s += PAGE * [self.now_s - self.pages[page]]
        self.num_new += PAGE * len(idle)
        if self.num_new > 0.1 * len(self.reuses_s):
            self.num_new = 0
            ordered = sorted(self.reuses_s)
            self.lease_s = 1.25 * ordered[math.ceil(0.9 * len(ordered)) - 1]

    def some(self, data: st.DataObject) -> Running:
        return self.running[data.draw(st.integers(0, len(self.running) - 1))]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(1, 24))
    def compute(self, data: st.DataObject, tokens: int) -> None:
        """Compute a chunk of a prompt; of a request without one, generate a token."""
        one = self.some(data)
        chunk = min(tokens, one.request.prompt_left_tokens)
        if not chunk:
            self.kv.generated(1)
            one.request.context_tokens += 1
            one.generated_tokens += 1
        else:
            one.request.context_tokens += chunk
            one.request.prompt_left_tokens -= chunk
            if not one.request.prompt_left_tokens:
                self.kv.share(one.request)
                self.insert(one)
        self.forget_evicted()

    def insert(self, one: Running) -> None:
        """Move whole pages of the known tokens into the tree."""
        if self.keeps:
            known = len(one.request.token_ids) // TOKEN_BYTES
            shared = min(one.request.context_tokens, known) // PAGE * PAGE
            one.locked_tokens = max(one.locked_tokens, shared)
            for page in self.path(one):
                self.pages.setdefault(page, 0.0)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), known=st.booleans())
    def release(self, data: st.DataObject, known: bool) -> None:
        one = self.some(data)
        if known and one.prompt:
            output = pack_tokens([7] * one.generated_tokens)
            one.request.token_ids = one.prompt + output
        self.insert(one)
        self.kv.release(one.request, self.now_s)
        self.running.remove(one)
        for page in self.path(one):
            self.pages[page] = max(self.pages[page], self.now_s)
        assert one.request.lock is None
        self.forget_evicted()

    @rule()
    def flush(self) -> None:
        self.kv.flush()
        locked = self.locked()
        self.pages = {page: rank for page, rank in self.pages.items() if page in locked}

    def forget_evicted(self) -> None:
        """Take over which pages were evicted: the oldest, and no more than was necessary."""
        held = self.kv._tree.match
        kept = {
            page: rank
            for page, rank in self.pages.items()
            if held(page, len(page) // TOKEN_BYTES) * TOKEN_BYTES == len(page)
        }
        gone = [rank for page, rank in self.pages.items() if page not in kept]
        locked = self.locked()
        assert locked <= kept.keys()
        if gone:
            idle = [rank for page, rank in kept.items() if page not in locked]
            assert max(gone) <= min(idle, default=math.inf)
            used = self.own_tokens() + PAGE * len(kept)
            assert used > self.capacity - PAGE, "evicted more than was necessary"
        self.pages = kept

    @invariant()
    def sums_are_right(self) -> None:
        if not hasattr(self, "kv"):
            return
        kv, tree = self.kv, self.kv._tree
        idle = [rank for page, rank in self.pages.items() if page not in self.locked()]
        assert kv._own_tokens == self.own_tokens()
        assert tree.total_tokens == PAGE * len(self.pages)
        assert tree.evictable_tokens == PAGE * len(idle)
        used = self.own_tokens() + PAGE * len(self.pages)
        assert used <= self.capacity or not idle, "idle prefixes make room"
        assert (kv.prompt_tokens, kv.cached_tokens) == (self.prompt_tokens, self.cached_tokens)

    @invariant()
    def the_lease_is_right(self) -> None:
        if not hasattr(self, "kv"):
            return
        kv, now_s = self.kv, self.now_s
        is_stale = self.unvouched_tokens > self.capacity
        is_rare = 16 * len(self.reuses_s) <= self.prompt_tokens
        is_unknown = is_rare and now_s - self.first_s < 300.0 and not is_stale
        lease_s = kv.lease_s(now_s)
        elapsed_s = now_s - self.first_s
        learned_s = 0.0 if is_stale else self.lease_s
        if elapsed_s < 2 * learned_s:
            learned_s = max(learned_s, elapsed_s)
        # A reuse at once counts as one after hardly any time.
        assert lease_s == pytest.approx(300.0 if is_unknown else learned_s, rel=0.01, abs=1e-9)
        idle = [rank for page, rank in self.pages.items() if page not in self.locked()]

        def used_within(seconds: float) -> int:
            return PAGE * sum(math.floor(rank) >= now_s - seconds for rank in idle)

        tokens, offline_share = kv.protection(now_s)
        assert tokens == (used_within(lease_s) if lease_s else 0)
        assert tokens <= PAGE * len(idle)
        assert offline_share == (1.0 if not lease_s else 1 / 4 if is_unknown else 1 / 16)

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for one in self.running:
            self.kv.release(one.request, self.now_s)
        assert self.kv._own_tokens == 0
        assert self.kv._tree.total_tokens == self.kv._tree.evictable_tokens <= self.capacity


def test_any_traffic_against_a_naive_model() -> None:
    run_state_machine_as_test(
        Shadow, settings=settings(max_examples=120, stateful_step_count=40, deadline=None)
    )


# --- How long a prefix should stay --------------------------------------------------------


def test_the_lease_is_five_minutes_until_it_is_known_that_nothing_comes_back() -> None:
    kv = ShadowKv(1000, 1, keeps_prefixes=True)
    assert kv.lease_s(1e6) == 300.0, "the first request may be the first turn of a conversation"
    serve(kv, request(1, 2, 3), 50.0)
    assert [kv.lease_s(now_s) for now_s in (50.0, 349.0, 350.0)] == [300.0, 300.0, 0.0]
    # Most online traffic reuses little, so offline requests keep a quarter of the KV meanwhile.
    assert [kv.protection(now_s) for now_s in (51.0, 400.0)] == [(3, 1 / 4), UNPROTECTED]


def test_it_is_known_that_nothing_comes_back_once_prompts_have_filled_all_kv() -> None:
    kv = ShadowKv(5, 1, keeps_prefixes=True)
    leases_s = []
    for first in (1, 4, 7):
        serve(kv, request(first, first + 1, first + 2), float(first))
        leases_s.append(kv.lease_s(float(first)))
    assert leases_s == [300.0, 0.0, 0.0]


def test_the_lease_ends_when_all_kv_was_filled_and_nothing_came_back() -> None:
    kv = ShadowKv(10, 1, keeps_prefixes=True)
    serve(kv, request(1, 2, 3), 0.0)
    serve(kv, request(1, 2, 3), 40.0)
    assert kv.lease_s(40.0) == pytest.approx(50.0, rel=0.01)
    leases_s = []
    for now_s in range(50, 54):
        serve(kv, request(now_s, 4, 5), now_s)
        leases_s.append(kv.lease_s(now_s))
    assert [lease_s > 0.0 for lease_s in leases_s] == [True, True, True, False]
    serve(kv, request(53, 4, 5), 63.0)
    assert kv.lease_s(63.0) > 0.0


def test_prompts_that_begin_alike_show_no_conversations() -> None:
    """One token in 32 comes back; a token vouches for 16."""
    kv = ShadowKv(100, 1, keeps_prefixes=True)
    leases_s = []
    for number in range(5):
        serve(kv, request(0, *(32 * number + place for place in range(1, 32))), 10.0 * number)
        leases_s.append(kv.lease_s(10.0 * number))
    assert leases_s == [300.0, 300.0, 300.0, 300.0, 300.0]
    for number in range(5, 9):
        serve(kv, request(0, *(32 * number + place for place in range(1, 32))), 10.0 * number)
    assert kv.lease_s(80.0) == 0.0


def test_a_flush_empties_the_baseline_too() -> None:
    kv = ShadowKv(1000, 1, keeps_prefixes=True)
    serve(kv, request(1, 2, 3), 0.0)
    running = request(4, 5, 6)
    assert kv.begin(running, 1.0, must_fit=True)
    kv.flush()
    kv.release(running, 2.0)
    assert serve(kv, request(1, 2, 3), 3.0) == 0


def test_the_lease_is_a_quarter_longer_than_nine_tenths_of_the_reused_tokens_take() -> None:
    """Each of ten conversations comes back with ten tokens; nine of them after a minute."""
    kv = ShadowKv(10_000, 1, keeps_prefixes=True)
    chats = [[100 * number + place for place in range(11)] for number in range(10)]
    for chat in chats:
        serve(kv, request(*chat), 0.0)
    for number, chat in enumerate(chats):
        assert serve(kv, request(*chat), 60.0 if number < 9 else 2000.0) == 10
    assert kv.lease_s(2000.0) == pytest.approx(75.0, rel=0.01)
    for chat in chats[:2]:
        serve(kv, request(*chat), 3060.0)
    assert kv.lease_s(3060.0) == pytest.approx(1.25 * 3000.0, rel=0.01)


def test_tokens_are_protected_until_their_lease_ends() -> None:
    kv = ShadowKv(1000, 1, keeps_prefixes=True)
    serve(kv, request(7), 0.0)
    serve(kv, request(1, 2, 3, 4), 200.0)
    serve(kv, request(1, 2, 3, 4, 5, 6), 240.0)
    assert kv.lease_s(240.0) == pytest.approx(50.0, rel=0.01)
    assert [kv.protection(now_s).tokens for now_s in (240.0, 285.0, 295.0)] == [6, 6, 0]
    running = request(1, 2, 3, 9)
    assert kv.begin(running, 250.0, must_fit=True)
    assert kv.protection(250.0).tokens == 3, "a running request needs no protection"


def test_all_prefixes_stay_until_late_ones_had_the_time_to_come_back() -> None:
    """Prefixes that come back after 40 s are seen before those that come back after 60 s."""
    kv = ShadowKv(1000, 1, keeps_prefixes=True)
    serve(kv, request(1, 2, 3), 0.0)
    serve(kv, request(4, 5, 6), 10.0)
    serve(kv, request(1, 2, 3), 40.0)
    assert [kv.lease_s(now_s) for now_s in (41.0, 70.0, 99.0)] == pytest.approx(
        [50.0, 70.0, 99.0], rel=0.01
    )
    assert kv.protection(69.0).tokens == 6
    assert kv.lease_s(101.0) == pytest.approx(50.0, rel=0.01)


def test_tokens_that_another_request_uses_are_no_reuse_after_a_time() -> None:
    kv = ShadowKv(1000, 1, keeps_prefixes=True)
    serve(kv, request(1, 2, 3), 0.0)
    first = request(1, 2, 3, 4)
    kv.begin(first, 10.0, must_fit=True)
    kv.begin(request(1, 2, 3, 5), 90.0, must_fit=True)
    assert kv.lease_s(90.0) == pytest.approx(12.5, rel=0.01)


def test_conversations_of_today_replace_conversations_of_yesterday() -> None:
    """Reuses are forgotten after a quarter of an hour, but for the last 10,000 tokens."""
    kv = ShadowKv(1 << 30, 1, keeps_prefixes=True)
    chat = list(range(6001))
    for turn in range(4):
        serve(kv, request(*chat), 100.0 * turn)
    assert kv.lease_s(400.0) == pytest.approx(125.0, rel=0.01)
    for turn in range(40):
        serve(kv, request(*chat), 5000.0 + 10.0 * turn)
    assert kv.lease_s(6000.0) == pytest.approx(12.5, rel=0.01)


# --- Who fits ------------------------------------------------------------------------------


def test_a_request_that_does_not_fit_waits_and_evicts_nothing() -> None:
    kv = ShadowKv(20, 1, keeps_prefixes=True)
    serve(kv, request(*range(8)), 0.0)
    running = request(*range(100, 110))
    assert kv.begin(running, 1.0, must_fit=True)
    late = request(*range(8), *range(50, 60))
    assert not kv.begin(late, 2.0, must_fit=True), "10 more tokens, where 2 + 0 are free"
    assert late.lock is None
    kv.release(running, 3.0)
    assert kv.begin(late, 4.0, must_fit=True)
    assert late.context_tokens == 8


def test_a_request_longer_than_all_kv_runs_alone() -> None:
    kv = ShadowKv(20, 1, keeps_prefixes=True)
    serve(kv, request(*range(8)), 0.0)
    long = request(*range(100, 140))
    assert not kv.begin(long, 1.0, must_fit=True)
    assert kv.begin(long, 1.0, must_fit=False)
    kv.release(long, 2.0)
    assert serve(kv, request(*range(9)), 3.0) == 0, "it has evicted the prefix"


def test_the_least_recently_used_prefix_makes_room() -> None:
    kv = ShadowKv(20, 1, keeps_prefixes=True)
    for number in range(3):
        serve(kv, request(*range(100 * number, 100 * number + 6)), float(number))
    serve(kv, request(*range(6), 9), 5.0)
    serve(kv, request(*range(900, 907)), 6.0)
    cached = [
        kv._tree.match(pack_tokens(range(100 * number, 100 * number + 6)), 6) for number in range(3)
    ]
    assert cached == [6, 0, 6]
