"""The online-only engine beside the real one: what it says must not depend on when it learns it."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.core.control.baseline import Baseline, BaselineRequest, BaselineStep, EngineSize
from sglang_coserve.core.offline_queue import pack_tokens
from sglang_coserve.core.step_stats import StepStats

Prompt = int | list[int]
"""Token ids, or the number of tokens that no other request has."""

Request = tuple[float, Prompt, int]
"""Arrival, prompt, output tokens."""


@dataclass(slots=True, eq=False, kw_only=True)
class Named(BaselineRequest):
    rid: str


class NamedBaseline(Baseline[Named]):
    """A baseline whose requests are told apart by name."""

    def __init__(self, size: EngineSize) -> None:
        super().__init__(size)
        self.named: dict[str, Named] = {}

    def arrive(self, rid: str, arrival_s: float, prompt: Prompt) -> Named:
        token_ids = [] if isinstance(prompt, int) else prompt
        one = Named(
            rid=rid,
            arrival_s=arrival_s,
            prompt_left_tokens=len(token_ids) or prompt,
            token_ids=pack_tokens(token_ids),
        )
        self.named[rid] = one
        self.arrived(one)
        return one

    def produce(self, rid: str, tokens: int = 1) -> None:
        self.named[rid].known_tokens += tokens

    def end(self, rid: str) -> None:
        self.ended(self.named[rid])


def predict(batch: StepStats) -> float:
    """Exact in binary, so that sums are."""
    return (8 + batch.prefill_tokens + 2 * batch.decode_requests) / 1024


def tokens_of(steps: list[BaselineStep[Named]]) -> list[tuple[str, float]]:
    """Whose, and when."""
    return [(one.rid, step.end_s) for step in steps for one in (*step.decoded, *step.first)]


def keys_of(steps: list[BaselineStep[Named]]) -> list[str]:
    return [rid for rid, _ in tokens_of(steps)]


def times(
    requests: list[Request], baseline: NamedBaseline, *, steps: int = 1, seed: int = 0
) -> dict[str, list[float]]:
    """Tokens of a baseline that hears of one real token after the other, in any order.

    A request's arrival is heard of before the first token of any that came later, as the
    baseline asks.
    """
    rng = random.Random(seed)
    found: defaultdict[str, list[float]] = defaultdict(list)
    end_s = 30.0  # Longer than all steps, and shorter than a baseline waits for a token.

    def collect(now_s: float) -> None:
        steps = baseline.advance(predict, now_s)
        for rid, at_s in tokens_of(steps):
            found[rid].append(at_s)
        for one in {one for step in steps for one in (*step.decoded, *step.first)}:
            its = found[one.rid]
            assert (one.tokens, one.first_s, one.last_s) == (len(its), its[0], its[-1])

    for number, (arrival_s, prompt, _) in enumerate(requests):
        baseline.arrive(str(number), arrival_s, prompt)
        collect(arrival_s)
    left = {str(number): tokens for number, (_, _, tokens) in enumerate(requests)}
    while left:
        for _ in range(steps):
            if left:
                rid = rng.choice(sorted(left))
                baseline.produce(rid)
                left[rid] -= 1
                if not left[rid]:
                    del left[rid]
                    baseline.end(rid)
        collect(end_s)
    collect(end_s)
    return dict(found)


def all_known(requests: list[Request], baseline: NamedBaseline) -> dict[str, list[float]]:
    """Tokens of a baseline that knows every output before it begins."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for number, (arrival_s, prompt, tokens) in enumerate(requests):
        baseline.arrive(str(number), arrival_s, prompt)
        baseline.produce(str(number), tokens)
        baseline.end(str(number))
    for rid, at_s in tokens_of(baseline.advance(predict, 1e6)):
        found[rid].append(at_s)
    return dict(found)


lengths = st.integers(1, 40)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=40)
"""Prompts of two token ids, so that most have a common prefix."""


@st.composite
def workloads(draw: st.DrawFn, prompts: st.SearchStrategy[Prompt]) -> list[Request]:
    gaps = draw(st.lists(st.integers(1, 64), min_size=1, max_size=8))
    arrivals = [sum(gaps[: i + 1]) / 1024 for i in range(len(gaps))]
    return [(a, draw(prompts), draw(st.integers(1, 6))) for a in arrivals]


loads = st.one_of(
    st.tuples(workloads(lengths), st.integers(30, 200)),
    # With little KV, which prefix is evicted depends on which requests are known to have ended.
    st.tuples(workloads(prompts), st.just(10_000)),
)


@given(
    load=loads,
    page=st.integers(1, 4),
    chunk=st.integers(1, 50),
    most_requests=st.integers(1, 4),
    mixes=st.booleans(),
    overlaps=st.booleans(),
    steps=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_what_it_says_does_not_depend_on_when_tokens_become_known(
    load: tuple[list[Request], int],
    page: int,
    chunk: int,
    most_requests: int,
    mixes: bool,
    overlaps: bool,
    steps: int,
    seed: int,
) -> None:
    requests, kv_tokens = load
    size = EngineSize(
        chunk_tokens=chunk,
        max_requests=most_requests,
        kv_tokens=kv_tokens,
        page_tokens=page,
        mixes_decodes=mixes,
        overlaps=overlaps,
    )

    def baseline() -> NamedBaseline:
        return NamedBaseline(size)

    heard, known = baseline(), baseline()
    found = times(requests, heard, steps=steps, seed=seed)
    assert found == all_known(requests, known)
    assert {rid: len(each) for rid, each in found.items()} == {
        str(number): tokens for number, (_, _, tokens) in enumerate(requests)
    }
    assert len(heard) == len(known) == 0


def make(**settings: int) -> NamedBaseline:
    size = EngineSize(chunk_tokens=100, max_requests=8, kv_tokens=1000)
    return NamedBaseline(replace(size, **settings))


def test_prompts_run_together_up_to_a_chunk_and_before_decodes() -> None:
    baseline = make(chunk_tokens=16)
    requests = [(0.0, 10, 3), (0.0, 10, 2)]
    # 16 tokens of prompt (10 + 6), then the other 4, then both decode.
    first_s = predict(StepStats(prefill_tokens=16))
    second_s = first_s + predict(StepStats(prefill_tokens=4))
    third_s = second_s + predict(StepStats(decode_requests=2))
    last_s = third_s + predict(StepStats(decode_requests=1))
    assert all_known(requests, baseline) == {
        "0": [first_s, third_s, last_s],
        "1": [second_s, third_s],
    }


@pytest.mark.parametrize("overlaps", [False, True])
def test_under_overlap_a_step_is_planned_when_the_one_before_begins(overlaps: bool) -> None:
    """The second prompt comes while the first is computed, and that step's decode is planned."""
    first_s = predict(StepStats(prefill_tokens=8))
    prompt_s, decode_s = first_s, predict(StepStats(decode_requests=1))
    found = all_known([(0.0, 8, 3), (first_s / 2, 8, 1)], make(overlaps=overlaps))
    if overlaps:
        assert found["1"] == [first_s + decode_s + prompt_s]
        assert found["0"][1] == first_s + decode_s
    else:
        assert found["1"] == [first_s + prompt_s]
        assert found["0"][1] == first_s + prompt_s + decode_s


def test_an_idle_engine_begins_when_a_request_arrives() -> None:
    found = all_known([(1.0, 8, 1), (5.0, 8, 1)], make())
    assert found == {"0": [1.0 + 16 / 1024], "1": [5.0 + 16 / 1024]}


def serve(baseline: NamedBaseline, rid: str, arrival_s: float, prompt: Prompt) -> Named:
    """Serve a request of one token to its end."""
    one = baseline.arrive(rid, arrival_s, prompt)
    baseline.produce(rid)
    baseline.end(rid)
    assert keys_of(baseline.advance(predict, arrival_s)) == [rid]
    return one


def test_a_prefix_of_an_earlier_request_needs_no_computing() -> None:
    baseline = make()
    serve(baseline, "first", 0.0, list(range(32)))
    again = serve(baseline, "again", 1.0, list(range(40)))
    assert again.first_s == 1.0 + predict(StepStats(prefill_tokens=8))


@pytest.mark.parametrize("known", ["another prompt", "unknown prompt"])
def test_a_request_finds_the_tokens_of_its_own_prompt_only(known: str) -> None:
    baseline = make()
    serve(baseline, "first", 0.0, list(range(40)))
    other = serve(baseline, "other", 1.0, 40 if known == "unknown prompt" else [7] * 40)
    assert other.first_s == 1.0 + predict(StepStats(prefill_tokens=40))


def test_without_a_prefix_cache_every_prompt_is_computed() -> None:
    baseline = NamedBaseline(EngineSize(keeps_prefixes=False))
    for rid, arrival_s in (("first", 0.0), ("again", 1.0)):
        one = serve(baseline, rid, arrival_s, list(range(40)))
        assert one.first_s == arrival_s + predict(StepStats(prefill_tokens=40))


def test_the_next_turn_finds_prompt_and_output_of_the_last() -> None:
    baseline = make()
    turn = baseline.arrive("turn", 0.0, list(range(20)))
    baseline.produce("turn", 5)
    turn.token_ids = pack_tokens(range(25))
    baseline.end("turn")
    baseline.advance(predict, 1.0)
    following = serve(baseline, "next", 1.0, list(range(30)))
    # The last output token has no KV.
    assert following.first_s == 1.0 + predict(StepStats(prefill_tokens=30 - 24))


def test_requests_share_the_kv_of_a_cached_prefix() -> None:
    """400 requests with a system prompt of 4,000 tokens, of which 25 fit if each has its own."""
    baseline = NamedBaseline(EngineSize(chunk_tokens=8192, max_requests=4096, kv_tokens=100_000))
    system = list(range(4000))
    serve(baseline, "system", 0.0, system)
    requests = []
    for number in range(400):
        prompt = [*system, *(10_000 + 10 * number + place for place in range(10))]
        requests.append(baseline.arrive(str(number), 10.0 + number / 16, prompt))
        baseline.produce(str(number), 100)
        baseline.end(str(number))
    baseline.advance(predict, 1e9)
    # A prompt waits for the decodes of a step, if any, and for others that came meanwhile.
    assert all(one.tokens == 100 and one.first_s - one.arrival_s < 2.0 for one in requests)


def test_requests_do_not_share_what_they_computed_themselves() -> None:
    """The second waits for the KV of the first, though not for that of the prefix."""
    baseline = NamedBaseline(EngineSize(chunk_tokens=1000, max_requests=8, kv_tokens=200))
    prefix = list(range(100))
    serve(baseline, "prefix", 0.0, prefix)
    for rid, own in (("a", 1000), ("b", 2000)):
        baseline.arrive(rid, 1.0, [*prefix, *range(own, own + 60)])
    assert keys_of(baseline.advance(predict, 2.0)) == ["a"]


def test_a_decode_step_waits_for_all_its_tokens() -> None:
    baseline = make()
    for rid in "ab":
        baseline.arrive(rid, 0.0, 8)
        baseline.produce(rid)
    assert keys_of(baseline.advance(predict, 9.0)) == ["a", "b"]
    baseline.produce("a")
    assert baseline.advance(predict, 9.0) == []
    baseline.end("b")
    assert keys_of(baseline.advance(predict, 9.0)) == ["a"]


def test_a_request_that_is_dropped_leaves() -> None:
    baseline = make(max_requests=1)
    baseline.arrive("a", 0.0, 8)
    baseline.arrive("b", 0.0, 8)
    baseline.advance(predict, 9.0)
    baseline.end("a")
    assert keys_of(baseline.advance(predict, 9.0)) == ["b"]
    baseline.end("b")
    assert baseline.advance(predict, 9.0) == []
    assert len(baseline) == 0


def test_a_request_of_which_nothing_is_heard_is_given_up() -> None:
    """Whatever comes meanwhile: prompts, and the tokens of others that it stops."""
    baseline = make()
    baseline.arrive("lost", 0.0, 8)
    baseline.arrive("long", 0.0, 8)
    now_s, found = 0.0, list[str]()
    for number in range(100):
        now_s += 1.0
        baseline.arrive(str(number), now_s, 8)
        baseline.produce(str(number))
        baseline.produce("long")
        baseline.end(str(number))
        found += keys_of(baseline.advance(predict, now_s))
    assert not baseline.named["lost"].is_in
    assert baseline.named["long"].is_in
    assert found.count("long") == 100


def test_a_pause_of_the_engine_gives_up_whatever_it_stopped() -> None:
    baseline = make()
    for key in "abcde":
        baseline.arrive(key, 0.0, 8)
    for now_s in (1.0, 30.0, 61.0):
        baseline.advance(predict, now_s)
        assert len(baseline) == 5
    baseline.advance(predict, 61.1)
    assert len(baseline) == 0
