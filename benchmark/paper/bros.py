"""BROS Fig. 9, 10 and 12: latency, throughput and attainment on hybrid workloads.

RT: Poisson arrivals, lognormal lengths with ShareGPT's mean and deviation (Table II). BE: uniform
lengths, in batches, one after the other. vLLM is first come, first served, RR in turns. The
bidirectional block layout itself is not modelled: with it, what RT takes from BE
is copied to the host and comes back; without, it is computed again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import mean
from typing import Final

from paper.experiment import Cell, Findings
from paper.testbed import Lengths, Testbed, gamma_arriving, offline_backlog
from sglang_coserve.core.planning.offline_phase import decode_offline, prefill_offline
from sglang_coserve.core.planning.online_phase import decode_online, prefill_online
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.policies.baselines import FcfsPolicy
from sglang_coserve.core.policies.bros import BrosPolicy
from sglang_coserve.core.policies.coserve import CoservePolicy
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.step import Bound
from sglang_coserve.metrics import SloTargets, attainment, latency_report
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import Workload, simulate

SHAREGPT: Final = Lengths.of_deviation(222.76, 256.36, 234.51, 268.50)
TTFT, TPOT = SloTargets(ttft_s=0.4), SloTargets(tpot_s=0.2)
TARGETS: Final = SloTargets(ttft_s=0.4, tpot_s=0.2)
SWAP_GB_S: Final = 20.0
SMALL: Final = Testbed(model="qwen2.5-14b", hardware="a100", tp_size=2, kv_capacity_tokens=216_000)
"""KV of 2 x 40 GB: 90% less 29.5 GB of weights, at 192 KiB a token."""

LARGE: Final = Testbed(model="qwen2.5-32b", hardware="a100", tp_size=4, kv_capacity_tokens=30_000)
BATCH: Final = 512
"""BE requests of a batch. The text does not state it; Fig. 2 is of so many requests."""


def best_effort() -> Iterator[tuple[int, int]]:
    """Yield the paper's synthetic BE lengths."""
    rng = random.Random(4)
    while True:
        yield rng.randint(512, 1024), rng.randint(32, 128)


class RoundRobin(FcfsPolicy):
    """RT and BE requests in turns, step by step (§II-B); neither takes the other's memory."""

    name = "rr"

    def compose(self, batch: StepBuilder) -> None:
        """See ``Policy.compose``."""
        batch.limit_tokens(self.chunk_tokens)
        turns = (self._serve_rt, self._serve_be)
        for serve in turns if batch.context.step % 2 else reversed(turns):
            serve(batch)
            if not batch.stats.is_empty:
                return

    def _serve_rt(self, batch: StepBuilder) -> None:
        decode_online(batch)
        prefill_online(batch, math.inf, may_retract=False)

    def _serve_be(self, batch: StepBuilder) -> None:
        batch.raise_offline(math.inf, Bound.NONE)
        decode_offline(batch, batch.offline_decodes)
        prefill_offline(batch)


class Batches(Iterator[SimRequest]):
    """BE requests: a batch comes when all of the one before have ended, until then none."""

    def __init__(self) -> None:
        self._all = iter(offline_backlog(best_effort)())
        self._batch: list[SimRequest] = []

    def __next__(self) -> SimRequest:
        if len(self._batch) == BATCH:
            if any(one.state is not RequestState.FINISHED for one in self._batch):
                raise StopIteration
            self._batch.clear()
        self._batch.append(next(self._all))
        return self._batch[-1]


def hybrid(rate_per_s: float, seconds: float) -> Workload:
    """Return RT requests beside BE requests that never run out."""
    online = gamma_arriving(rate_per_s, 1.0, SHAREGPT, seconds)
    return Workload(online, Batches, BATCH, seconds)


def normalized_s(result: SimulationResult) -> float:
    """Return the mean end-to-end latency per output token."""
    return latency_report(result.online).normalized.mean_s or math.nan


def best_effort_per_s(result: SimulationResult) -> float:
    """Return how many BE requests ended each second."""
    return result.offline_throughput.requests_per_s


def share(result: SimulationResult, targets: SloTargets) -> float:
    """Return the fraction of RT requests within one target."""
    return attainment(result.online, targets) or 0.0


def fig9_10(seconds: float) -> Iterator[Findings]:
    """Latency, throughput and attainment; Qwen2.5-14B on two A100s of 40 GB.

    Fig. 12, KV that is kept: Qwen2.5-32B on four, with so little memory that RT takes it from BE.
    """
    testbed = replace(SMALL, checkpoint_gb_s=SWAP_GB_S)
    rows: list[tuple[Cell, ...]] = []

    def add(name: str, result: SimulationResult) -> None:
        shares = (100 * share(result, TTFT), 100 * share(result, TPOT))
        speeds = (normalized_s(result) * 1e3, best_effort_per_s(result))
        rows.append((name, *speeds, *shares, result.counters.retractions))

    policies: tuple[type[Policy], ...] = (FcfsPolicy, RoundRobin, BrosPolicy, CoservePolicy)
    by_policy: dict[str, list[SimulationResult]] = {policy.name: [] for policy in policies}
    for rate in (4.0, 8.0, 12.0):
        load = hybrid(rate, seconds)
        for policy in policies:
            result = simulate(load, testbed.with_targets(TARGETS), policy())
            by_policy[policy.name].append(result)
            add(f"{rate:g} req/s {policy.name}", result)
    vllm, rr, bros = (by_policy[name] for name in ("fcfs", "rr", "bros"))

    def change(of: Callable[[SimulationResult], float], base: Sequence[SimulationResult]) -> str:
        return f"{sum(map(of, bros)) / sum(map(of, base)) - 1:.1%}"

    def attained(of: SloTargets) -> str:
        by_system = [mean(share(r, of) for r in results) for results in (bros, vllm, rr)]
        return "{:.1%} instead of {:.1%}, {:.1%}".format(*by_system)

    again, kept = (
        simulate(hybrid(10.0, seconds), bed.with_targets(TARGETS), BrosPolicy())
        for bed in (LARGE, replace(LARGE, checkpoint_gb_s=SWAP_GB_S))
    )
    add("32B, 10 req/s bros, KV computed again", again)
    add("32B, 10 req/s bros, KV kept", kept)

    yield Findings(
        "Fig. 9, 10 and 12",
        ("RT rate, policy", "ms/token", "BE req/s", "TTFT SLO %", "TPOT SLO %", "retractions"),
        rows,
        [
            ("normalized RT latency against vLLM", "-74.20%", change(normalized_s, vllm)),
            ("the same against RR", "-54.31%", change(normalized_s, rr)),
            ("BE throughput against vLLM", "-11.29%", change(best_effort_per_s, vllm)),
            ("the same against RR", "-8.80%", change(best_effort_per_s, rr)),
            ("TTFT attainment; vLLM, RR", "46.6%; 1.28%, 10.55%", attained(TTFT)),
            ("TPOT attainment; vLLM, RR", "1.73x; 1.47x", attained(TPOT)),
            ("TTFT attainment, KV kept", "1.23x", f"{share(kept, TTFT) / share(again, TTFT):.2f}x"),
            ("TPOT attainment, KV kept", "1.63x", f"{share(kept, TPOT) / share(again, TPOT):.2f}x"),
        ],
    )
