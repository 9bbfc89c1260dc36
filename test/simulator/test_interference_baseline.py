"""Baseline and bill of a co-served run, against a run of the same requests alone (simulated)."""

from __future__ import annotations

import io
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from core.test_baseline import NamedBaseline
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.bill import BillReport
from sglang_coserve.core.control.slo import deadlines, parse_slo
from sglang_coserve.core.policies import POLICIES, make_policy
from sglang_coserve.core.policies.baselines import OnlineOnlyPolicy
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator.assemble import SimulatedMachine, offline_requests
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.observer import EventLog, RequestEvent, SimulationObserver
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.run import BASELINES, SimulationSetup, Workload, simulate
from sglang_coserve.workload.trace import TraceRequest

MODEL = SimulatedMachine.named("llama-3.1-8b", "h100").roofline()
KV_TOKENS = 400_000
REQUESTS = 400


def trace(rate_per_s: float, prompt_tokens: int, output_tokens: int) -> Iterator[TraceRequest]:
    rng = random.Random(5)
    arrival_s = 0.0
    for index in range(REQUESTS):
        arrival_s += rng.expovariate(rate_per_s)
        lengths = (rng.lognormvariate(math.log(n), 0.6) for n in (prompt_tokens, output_tokens))
        yield TraceRequest(index, arrival_s, *(max(1, int(n)) for n in lengths))


def workload(requests: list[TraceRequest], offline: str) -> Workload:
    return Workload(
        online=lambda: from_trace(requests, request_class=RequestClass.ONLINE, seed=0),
        offline=offline_requests(offline, max_context_tokens=100_000),
        backlog_depth=64,
        interval_s=requests[-1].arrival_s,
    )


def alone_of(config: ExecutorConfig) -> EngineSize:
    """Of a baseline that composes steps as the policy ``online_only`` does."""
    chunk_tokens = OnlineOnlyPolicy().chunk_tokens
    return replace(config.engine_size, chunk_tokens=chunk_tokens, mixes_decodes=True)


class Follower(SimulationObserver):
    """Tells a baseline what happens to the online requests of a run."""

    def __init__(self, size: EngineSize) -> None:
        self.alone: defaultdict[str, list[float]] = defaultdict(list)
        self.online: dict[str, SimRequest] = {}
        self._told: dict[str, int] = {}
        self._baseline = NamedBaseline(size)

    def on_request(self, _now_s: float, event: RequestEvent, request: SimRequest) -> None:
        info = request.info
        if not info.is_online:
            return
        if event is RequestEvent.ARRIVED:
            self.online[info.rid] = request
            self._told[info.rid] = 0
            self._baseline.arrive(info.rid, info.arrival_s, info.prompt_tokens)
        elif event is RequestEvent.FINISHED:
            self._tell(request)
            del self._told[info.rid]
            self._baseline.end(info.rid)

    def on_step(self, record: Mapping[str, Any]) -> None:
        for rid in list(self._told):
            self._tell(self.online[rid])
        # What arrived since the step began is not told of yet.
        self.advance(record["start_s"])

    def advance(self, now_s: float) -> None:
        for step in self._baseline.advance(MODEL.predict, now_s):
            for one in (*step.decoded, *step.first):
                self.alone[one.rid].append(step.end_s)

    def _tell(self, request: SimRequest) -> None:
        rid = request.info.rid
        new = len(request.token_times_s) - self._told[rid]
        self._baseline.produce(rid, new)
        self._told[rid] += new


def quantiles_ms(times: dict[str, list[float]], online: dict[str, SimRequest]) -> list[float]:
    """P50 and P99 of TTFT and ITL."""
    ttfts_s = [tokens[0] - online[rid].info.arrival_s for rid, tokens in times.items()]
    gaps_s = np.concatenate([np.diff(tokens) for tokens in times.values()])
    return [1e3 * float(np.quantile(v, q)) for v in (ttfts_s, gaps_s) for q in (0.5, 0.99)]


@pytest.mark.parametrize(
    ("alone", "overlap"),
    [("online_only", False), ("coserve", False), ("coserve", True)],
    ids=["mixed", "plain", "plain-overlap"],
)
@pytest.mark.parametrize("lengths", [(1024, 128), (256, 512)], ids=["prompts", "outputs"])
def test_it_says_within_a_twentieth_what_requests_get_alone(
    lengths: tuple[int, int], alone: str, overlap: bool
) -> None:
    """Without offline work the policy coserve runs what plain SGLang runs."""
    requests = list(trace(8.0, *lengths))
    config = ExecutorConfig(kv_capacity_tokens=KV_TOKENS, overlap=overlap)
    size = alone_of(config) if alone == "online_only" else config.engine_size

    def run(policy: str, offline: str, targets: SloTargets) -> tuple[list[float], list[float]]:
        setup = SimulationSetup(MODEL, config, targets)
        follower = Follower(size)
        load = workload(requests, offline)
        simulate(load, setup, make_policy(policy), observers=[follower])
        follower.advance(math.inf)
        served = {r: list(q.token_times_s) for r, q in follower.online.items() if q.is_complete}
        baseline = {rid: follower.alone[rid] for rid in served}
        assert all(len(baseline[rid]) == len(times) for rid, times in served.items())
        return quantiles_ms(served, follower.online), quantiles_ms(baseline, follower.online)

    expected, _ = run(alone, "none", SloTargets())
    measured, baseline = run("coserve", "2048x256", SloTargets(0.5, 0.05))
    assert measured[0] > 1.2 * expected[0], "offline work must make a difference to be told apart"
    assert baseline == pytest.approx(expected, rel=0.05)


class ToldSetup(SimulationSetup):
    """Tells every scheduler of online requests."""

    def follows_latencies(self, policy: Policy) -> bool:
        return True


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_that_looks_at_no_latencies_plans_the_same_without_them(policy: str) -> None:
    slos = tuple(map(parse_slo, ("ttft p99 <= +10%", "tbt p99 <= +10%")))
    machine = (MODEL, ExecutorConfig(kv_capacity_tokens=20_000))
    setup = SimulationSetup(*machine, slos=slos)
    assert setup.follows_latencies(make_policy(policy)) == (policy not in BASELINES)
    logs = []
    for each in (setup, ToldSetup(*machine, slos=slos)):
        load = replace(workload(list(trace(8.0, 1024, 64))[:40], "1024x64"), interval_s=4.0)
        log = io.StringIO()
        simulate(load, each, make_policy(policy), observers=[EventLog(log, {})])
        logs.append(log.getvalue())
    assert logs[0] == logs[1]


@dataclass(frozen=True)
class BilledSetup(ToldSetup):
    """Keeps its schedulers, for what they have billed."""

    made: list[Scheduler] = field(default_factory=list)

    def make_scheduler(self, policy: Policy) -> Scheduler:
        slos, size = deadlines(self.targets), alone_of(self.executor)
        self.made.append(Scheduler(policy, self.model, slos, self.scheduler, engine=size))
        return self.made[-1]


@pytest.mark.parametrize("rate_per_s", [1.0, 4.0])
@pytest.mark.parametrize("policy", ["coserve", "non_preemptive"])
def test_the_billed_sum_is_what_online_requests_lost(policy: str, rate_per_s: float) -> None:
    requests = list(trace(rate_per_s, 1024, 128))[:300]
    config = ExecutorConfig(kv_capacity_tokens=KV_TOKENS)
    setup = BilledSetup(MODEL, config, SloTargets(0.5, 0.05))

    def run(policy: str, offline: str) -> tuple[float, BillReport]:
        """All TTFTs and all gaps together, and the bill."""
        result = simulate(workload(requests, offline), setup, make_policy(policy))
        bill = setup.made[-1].interference.bill
        assert bill is not None
        served = [one for one in result.online if one.token_times_s]
        return sum(one.token_times_s[-1] - one.arrival_s for one in served), bill.report()

    alone_s, unbilled = run("online_only", "none")
    assert unbilled.requests == 0
    beside_s, billed = run(policy, "2048x256")
    lost_s = beside_s - alone_s
    assert lost_s > 0.2 * alone_s, "offline work must make a difference to be told apart"
    assert billed.requests >= 0.9 * len(requests)
    assert billed.total_s == pytest.approx(lost_s, rel=0.15)
    assert billed.unowned_s == pytest.approx(billed.total_s)
