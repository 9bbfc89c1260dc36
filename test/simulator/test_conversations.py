"""Conversations stay cached beside offline work, which loses nothing without them (simulated)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice

import numpy as np
import pytest

from sglang_coserve.core.control.objective import Objective
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.policies.coserve import CoservePolicy
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator.assemble import SimulatedMachine, offline_requests
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import SimulationSetup, Workload, simulate
from sglang_coserve.workload.trace import BLOCK_TOKENS, TraceRequest
from simulator.engines import engine_of, offline, online, run_out

MODEL = SimulatedMachine.named("llama-3.1-8b", "h100").roofline()
KV_TOKENS = 200_000

TURN_S = 30.0
"""Mean time between the turns of a conversation."""

TURNS = 5
CHATS = 20
BLOCKS = 8
"""Blocks of 512 tokens in the history of a conversation; each turn adds one."""

LEARNED_S = 2.5 * TURN_S
"""From then on every conversation had a second turn, and offline requests of before have ended."""

END_S = (TURNS - 0.5) * TURN_S

Offline = Callable[[], Iterable[SimRequest]]


def conversations() -> list[TraceRequest]:
    """Chats whose every turn has all that was said before as a prefix."""
    rng = random.Random(4)
    turns = []
    for chat in range(CHATS):
        at_s = rng.uniform(0.0, TURN_S)
        for turn in range(TURNS):
            blocks = tuple(1000 * chat + place for place in range(BLOCKS + turn))
            turns.append((at_s, blocks))
            at_s += TURN_S * rng.uniform(0.8, 1.2)
    return [
        TraceRequest(index, at_s, BLOCK_TOKENS * len(blocks), 64, blocks)
        for index, (at_s, blocks) in enumerate(sorted(turns))
    ]


def of_lengths(text: str) -> Offline:
    return offline_requests(text, max_context_tokens=KV_TOKENS)


def of_many_lengths() -> Iterable[SimRequest]:
    rng = random.Random(3)
    trace = (
        TraceRequest(index, 0.0, rng.randint(256, 4096), rng.randint(32, 224)) for index in count()
    )
    return from_trace(trace, RequestClass.OFFLINE, seed=0)


def of_documents() -> Iterable[SimRequest]:
    """Eight questions about each of many documents."""
    blocks = (range(100 * document, 100 * document + 8) for document in count())
    prompts = (tuple(document) for document in blocks for _ in range(8))
    trace = (
        TraceRequest(index, 0.0, 8 * BLOCK_TOKENS + 64, 64, prompt)
        for index, prompt in enumerate(prompts)
    )
    return from_trace(trace, RequestClass.OFFLINE, seed=0)


@dataclass(frozen=True)
class KeptSetup(SimulationSetup):
    """Keeps its schedulers, for what they know in the end."""

    made: list[Scheduler] = field(default_factory=list)

    def make_scheduler(self, policy: Policy) -> Scheduler:
        self.made.append(super().make_scheduler(policy))
        return self.made[-1]


def served(
    requests: Sequence[TraceRequest], batch: Offline = tuple, *, end_s: float = END_S
) -> tuple[SimulationResult, Scheduler]:
    """Serve requests beside an endless batch, with the default objective."""
    objective = Objective.of("coserve", ())
    setup = KeptSetup(
        MODEL,
        ExecutorConfig(kv_capacity_tokens=KV_TOKENS, overlap=True, paced=True),
        slos=objective.slos,
        scheduler=SchedulerConfig(stream_slowdown=objective.stream_slowdown),
    )
    load = Workload(
        online=partial(from_trace, requests, RequestClass.ONLINE, seed=0),
        offline=batch,
        backlog_depth=200,
        interval_s=end_s,
    )
    return simulate(load, setup, make_policy("coserve")), setup.made[0]


def found_share(result: SimulationResult, since_s: float) -> float:
    """Share of the prompt tokens that online requests found in the cache."""
    late = [one for one in result.online if one.arrival_s >= since_s]
    found = sum(one.cached_prompt_tokens for one in late)
    return found / sum(one.prompt_tokens for one in late)


def ttft_s(result: SimulationResult, share: float, since_s: float = 0.0) -> float:
    """A quantile of the TTFT."""
    late = [one for one in result.online if one.arrival_s >= since_s]
    return float(np.quantile([one.token_times_s[0] - one.arrival_s for one in late], share))


@pytest.fixture(scope="module")
def alone() -> SimulationResult:
    return served(conversations())[0]


@pytest.mark.parametrize("lengths", ["4096x64", "1024x512", "256x1024"])
def test_conversations_stay_cached_beside_a_batch(alone: SimulationResult, lengths: str) -> None:
    """The batch turns the KV over several times."""
    beside, scheduler = served(conversations(), of_lengths(lengths))
    assert beside.counters.offline_tokens > 4 * KV_TOKENS
    assert found_share(alone, LEARNED_S) > 0.85
    assert found_share(beside, LEARNED_S) >= 0.95 * found_share(alone, LEARNED_S)
    assert ttft_s(beside, 0.99) <= 1.3 * ttft_s(alone, 0.99)
    # A step without online work lasts twice its fixed cost, which is half of these first tokens.
    assert ttft_s(beside, 0.5, LEARNED_S) <= 2 * ttft_s(alone, 0.5, LEARNED_S)
    assert scheduler.online_lease_s(END_S) == pytest.approx(1.25 * 1.15 * TURN_S, rel=0.1)


def test_without_protection_a_batch_evicts_conversations(
    alone: SimulationResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loads of these tests need protection."""
    switch_off(monkeypatch)
    beside, _ = served(conversations(), of_lengths("4096x64"))
    assert found_share(beside, LEARNED_S) < 0.5 * found_share(alone, LEARNED_S)


def switch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoservePolicy, "protects_prefixes", False)


@pytest.mark.parametrize(
    "batch", [of_many_lengths, of_lengths("1024x512")], ids=["many lengths", "long outputs"]
)
def test_without_reuse_nothing_is_protected(
    batch: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five minutes after the first request it is known that none comes back."""
    first, *others = [replace(one, hash_ids=()) for one in conversations()]
    later = [replace(one, arrival_s=one.arrival_s + 400.0) for one in others]

    def offline_tokens() -> int:
        result, scheduler = served([first, *later], lambda: arriving(batch, 400.0), end_s=425.0)
        assert scheduler.interference.kv is not None
        assert scheduler.interference.kv.cached_tokens == 0
        return result.counters.offline_tokens

    protected_tokens = offline_tokens()
    switch_off(monkeypatch)
    assert protected_tokens == pytest.approx(offline_tokens(), rel=0.02)


def arriving(batch: Offline, at_s: float) -> Iterator[SimRequest]:
    """So many requests of a batch that they are not through after half a minute."""
    for request in islice(batch(), 700):
        request.arrive_at(at_s)
        yield request


def test_offline_requests_find_their_common_prefixes_beside_conversations() -> None:
    def offline_share(requests: Sequence[TraceRequest]) -> float:
        result, _ = served(requests, of_documents)
        found = sum(one.cached_prompt_tokens for one in result.offline)
        return found / sum(one.prompt_tokens for one in result.offline if one.token_times_s)

    without = offline_share([])
    assert without > 0.7
    assert offline_share(conversations()) >= 0.95 * without


# --- What eviction costs is billed --------------------------------------------------------

PROMPT = [10**9 + place for place in range(60)]


def beside() -> SimRequest:
    """Decodes when the prompt comes, so a step more and a token more are waited for."""
    return offline("beside", 2, 40, arrival_s=2.98)


def billed_ms(*before: SimRequest) -> float:
    """The bill for the TTFT of ``PROMPT`` at 3 s; a step takes a millisecond a token."""
    last = online("last", PROMPT, 1, arrival_s=3.0)
    config = ExecutorConfig(kv_capacity_tokens=150, page_tokens=1)
    targets = SloTargets(ttft_s=1.0)
    engine = engine_of(*before, last, policy="coserve", config=config, targets=targets)
    run_out(engine)
    bill = engine._scheduler.interference.bill
    assert bill is not None
    report = bill.report()
    assert report.unowned_s == pytest.approx(report.total_s)
    return 1e3 * report.ttft_s


def test_the_bill_charges_what_an_evicted_prefix_costs() -> None:
    turn = online("turn", PROMPT, 1)
    evicting = offline("evicting", 145, 1, arrival_s=1.0)
    assert billed_ms(turn, evicting, beside()) == pytest.approx(54, abs=3)


def test_the_bill_charges_an_evicted_prefix_also_after_the_batch_has_ended() -> None:
    evicting = offline("evicting", 145, 1, arrival_s=1.0)
    assert billed_ms(online("turn", PROMPT, 1), evicting) == pytest.approx(54, abs=8)
    assert billed_ms(online("turn", PROMPT, 1), offline("small", 20, 1, arrival_s=1.0)) == 0


def test_the_bill_charges_nothing_for_a_prefix_that_stays() -> None:
    turn = online("turn", PROMPT, 1)
    assert billed_ms(turn, offline("small", 20, 1, arrival_s=1.0), beside()) == pytest.approx(
        0, abs=3
    )
    assert billed_ms(beside()) == pytest.approx(0, abs=3), "it computes all alone, too"


def test_the_bill_credits_a_prefix_that_offline_work_computed() -> None:
    assert billed_ms(offline("same", PROMPT, 1, arrival_s=1.0), beside()) == pytest.approx(
        -59, abs=3
    )
