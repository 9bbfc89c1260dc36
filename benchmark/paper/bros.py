"""BROS Fig. 9 and 10: latency, throughput and attainment on hybrid workloads.

RT: Poisson arrivals, lognormal lengths with ShareGPT's mean and deviation (Table II). BE: uniform
lengths; 128 always wait (the paper submits them in batches, one after the other). vLLM is first
come, first served. SLOs: TTFT 0.4 s, TPOT 0.2 s. Round-robin is not a policy here. The
bidirectional block layout itself is not modelled: with it, what RT takes from BE is copied to the
host and comes back; without, it is computed again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Final

from paper.experiment import Cell, Claim, Conditions, Findings
from paper.testbed import Lengths, Testbed, gamma_arriving, offline_backlog, run
from sglang_coserve.core.policies import make_policy
from sglang_coserve.metrics import SloTargets, attainment, latency_report
from sglang_coserve.simulator.assemble import SimulatedMachine
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import Workload

SHAREGPT: Final = Lengths.of_deviation(222.76, 256.36, 234.51, 268.50)
TTFT, TPOT = SloTargets(ttft_s=0.4), SloTargets(tpot_s=0.2)
TARGETS: Final = SloTargets(ttft_s=0.4, tpot_s=0.2)
SWAP_BYTE_PER_S: Final = 20e9


def best_effort() -> Iterator[tuple[int, int]]:
    """Yield the paper's synthetic BE lengths."""
    rng = random.Random(4)
    while True:
        yield rng.randint(512, 1024), rng.randint(32, 128)


def hybrid(rate_per_s: float, seconds: float) -> Workload:
    """Return RT requests beside BE requests that never run out."""
    return Workload(
        online=gamma_arriving(rate_per_s, 1.0, SHAREGPT, seconds),
        offline=offline_backlog(best_effort),
        backlog_depth=128,
        interval_s=seconds,
    )


def normalized_s(result: SimulationResult) -> float:
    """Return the mean end-to-end latency per output token."""
    return latency_report(result.online).normalized.mean_s or math.nan


def share(result: SimulationResult, targets: SloTargets) -> float:
    """Return the fraction of RT requests within one target."""
    return attainment(result.online, targets) or 0.0


def be_per_s(results: Sequence[SimulationResult]) -> float:
    """Return the mean BE requests a second."""
    return mean(result.offline_throughput.requests_per_s for result in results)


def fig9_10(conditions: Conditions) -> Iterator[Findings]:
    """Latency, throughput and attainment; Qwen2.5-14B on two A100s of 40 GB."""
    machine = SimulatedMachine.named("qwen2.5-14b", "a100", tp_size=2)
    # KV of 2 x 40 GB: 90% less 29.5 GB of weights, at 192 KiB a token.
    testbed = Testbed(machine, kv_tokens=216_000, checkpoint_byte_per_s=SWAP_BYTE_PER_S)
    rows: list[tuple[Cell, ...]] = []
    by_policy: dict[str, list[SimulationResult]] = {"fcfs": [], "bros": [], "coserve": []}
    for rate in (4.0, 8.0, 12.0):
        load = hybrid(rate, conditions.seconds)
        for policy, results in by_policy.items():
            result = run(load, testbed.setup(TARGETS), make_policy(policy))
            results.append(result)
            rows.append(
                (
                    f"{rate:g} req/s {policy}",
                    normalized_s(result) * 1e3,
                    result.offline_throughput.requests_per_s,
                    100 * share(result, TTFT),
                    100 * share(result, TPOT),
                )
            )
    vllm, bros = by_policy["fcfs"], by_policy["bros"]
    latency = mean(map(normalized_s, bros)) / mean(map(normalized_s, vllm)) - 1

    def attained(of: SloTargets) -> str:
        ours, theirs = (mean(share(r, of) for r in results) for results in (bros, vllm))
        return f"{ours:.1%} instead of {theirs:.1%}"

    yield Findings(
        "Fig. 9 and 10",
        ("RT rate, policy", "normalized ms/token", "BE req/s", "TTFT SLO %", "TPOT SLO %"),
        rows,
        [
            Claim(
                "normalized RT latency against vLLM",
                "-74.20%",
                f"{latency:.1%}",
                "BROS fills steps up to the TPOT target in both; vLLM's queue differs",
            ),
            Claim(
                "BE throughput against vLLM",
                "-11.29%",
                f"{be_per_s(bros) / be_per_s(vllm) - 1:.1%}",
            ),
            Claim(
                "TTFT attainment",
                "46.6% instead of 1.28% (36.38x)",
                attained(TTFT),
                "RT waits behind all BE under vLLM; how deep, the text does not state",
            ),
            Claim(
                "TPOT attainment",
                "1.73x",
                attained(TPOT),
                "vLLM's retractions, which cost it TPOT, are rare here: admission keeps headroom",
            ),
        ],
    )
