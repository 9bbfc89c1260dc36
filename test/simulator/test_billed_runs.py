"""The bill of a co-served run, against what a run of the same requests alone took (simulated)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.slo import deadlines
from sglang_coserve.core.offline_queue import OfflineQueue
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.policies.baselines import OnlineOnlyPolicy
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator.assemble import SimulatedMachine, offline_requests
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import SimulationSetup, Workload, simulate
from sglang_coserve.workload.trace import TraceRequest

MODEL = SimulatedMachine.named("llama-3.1-8b", "h100").roofline()
KV_TOKENS = 400_000
REQUESTS = 300


@dataclass(frozen=True)
class KeptSetup(SimulationSetup):
    """Keeps its schedulers; their baseline composes steps as the policy ``online_only`` does."""

    made: list[Scheduler] = field(default_factory=list)

    def follows_latencies(self, policy: Policy) -> bool:
        """Always: what it was billed is asked for."""
        return True

    def make_scheduler(self, policy: Policy) -> Scheduler:
        engine = EngineSize(
            chunk_tokens=OnlineOnlyPolicy().chunk_tokens,
            max_requests=self.executor.max_running_requests,
            kv_tokens=KV_TOKENS,
            mixes_decodes=True,
        )
        queue = OfflineQueue(policy.queue_config(self.scheduler.seed))
        slos = deadlines(self.targets)
        self.made.append(Scheduler(policy, self.model, slos, queue, self.scheduler, engine=engine))
        return self.made[-1]


def trace(rate_per_s: float) -> Iterator[TraceRequest]:
    rng = random.Random(5)
    arrival_s = 0.0
    for index in range(REQUESTS):
        arrival_s += rng.expovariate(rate_per_s)
        yield TraceRequest(index, arrival_s, rng.randint(200, 2000), rng.randint(20, 200))


def seconds(result: SimulationResult) -> tuple[float, float]:
    """All TTFTs together, and all gaps."""
    lines = [line for line in result.online if line.token_times_s]
    ttft_s = sum(line.token_times_s[0] - line.arrival_s for line in lines)
    return ttft_s, sum(line.token_times_s[-1] - line.token_times_s[0] for line in lines)


@pytest.mark.parametrize("rate_per_s", [1.0, 4.0])
@pytest.mark.parametrize("policy", ["coserve", "non_preemptive"])
def test_the_billed_sum_is_what_online_requests_lost(policy: str, rate_per_s: float) -> None:
    requests = list(trace(rate_per_s))
    setup = KeptSetup(MODEL, ExecutorConfig(kv_capacity_tokens=KV_TOKENS), SloTargets(0.5, 0.05))

    def run(policy: str, offline: str) -> tuple[float, float]:
        workload = Workload(
            online=lambda: from_trace(requests, request_class=RequestClass.ONLINE, seed=0),
            offline=offline_requests(offline, max_context_tokens=100_000),
            backlog_depth=64,
            interval_s=requests[-1].arrival_s,
        )
        return seconds(simulate(workload, setup, make_policy(policy)))

    alone_s = run("online_only", "none")
    assert setup.made[-1].interference.bill is not None
    assert setup.made[-1].interference.bill.report().requests == 0
    beside_s = run(policy, "2048x256")
    bill = setup.made[-1].interference.bill
    assert bill is not None
    billed = bill.report()
    lost_s = sum(beside_s) - sum(alone_s)
    assert lost_s > 0.2 * sum(alone_s), "offline work must make a difference to be told apart"
    assert billed.requests >= 0.9 * REQUESTS
    assert billed.total_s == pytest.approx(lost_s, rel=0.15)
    assert billed.unowned_s == pytest.approx(billed.total_s)
