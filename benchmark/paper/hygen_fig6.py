"""HyGen Fig. 6: prefix sharing maximization (PSM) on MMLU-like offline requests.

    python benchmark/paper/hygen_fig6.py --trace AzureLLMInferenceTrace_conv.csv

Llama-2-7B on one A100 of 40 GB. Offline: 57 subjects, 512 shared tokens each (the
five examples of the usual prompt) and a question of some 128 tokens, shuffled;
two tokens of output. The paper computed its figure too: it deducts from each
prompt what it shares with the one before it. So PSM is compared with arrival
order under that rule (here: no prefix cache, for neighbours hardly ever share),
and, beyond the paper, with arrival order under a real prefix cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from harness import Claim, Testbed, azure_online, main, p99_itl_ms, print_claims, print_table, run

from sglang_coserve.core.policies.hygen import HygenPolicy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator import Setup, Workload
from sglang_coserve.simulator.assemble import Machine
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.workload import TraceRequest

MACHINE = Machine.named("llama-2-7b", "a100")
KV_TOKENS = 42_000
"""Of 40 GB: 90% less 13.5 GB of weights, at 512 KiB a token."""

SUBJECTS, SHARED_TOKENS, QUESTION_TOKENS = 57, 512, (64, 192)
QPS = (0.5, 1.0, 2.0)


def mmlu_like(seed: int = 3) -> Callable[[], Iterable[SimRequest]]:
    """Return what makes 100,000 shuffled questions."""
    rng = random.Random(seed)
    trace = [
        TraceRequest(
            index, 0.0, SHARED_TOKENS + rng.randint(*QUESTION_TOKENS), 2, (rng.randrange(SUBJECTS),)
        )
        for index in range(100_000)
    ]
    return partial(from_trace, trace, RequestClass.OFFLINE)


def without_cache(setup: Setup) -> Setup:
    """Return the same machine, where no KV is shared."""
    return replace(setup, executor=replace(setup.executor, prefix_cache=False))


def experiment(seconds: float, trace: str | None) -> None:
    """Compare the orders at several online rates."""
    testbed = Testbed(MACHINE, kv_tokens=KV_TOKENS)
    rows: list[tuple[object, ...]] = []
    gains = []
    for qps in QPS:
        load = Workload(azure_online(trace, qps, seconds), mmlu_like(), 5_000, interval_s=seconds)
        alone = run(load, testbed.setup(SloTargets()), "online_only")
        setup = testbed.setup(SloTargets(tpot_s=1.5 * p99_itl_ms(alone) / 1e3))
        results = {
            "arrival order, nothing shared": run(
                load, without_cache(setup), HygenPolicy(utility_ratio=0.0)
            ),
            "arrival order, prefix cache": run(load, setup, HygenPolicy(utility_ratio=0.0)),
            "PSM with freshness (0.95)": run(load, setup, HygenPolicy()),
            "PSM": run(load, setup, HygenPolicy(utility_ratio=1.0)),
        }
        per_s = {name: result.offline_throughput.requests_per_s for name, result in results.items()}
        least = per_s["arrival order, nothing shared"]
        gains.append(per_s["PSM"] / least if least else math.nan)
        rows += (
            (f"{qps:g} QPS, {name}", value, f"{value / least:.2f}x", p99_itl_ms(results[name]))
            for name, value in per_s.items()
        )
    print_table("Fig. 6", ("online, order", "offline req/s", "gain", "P99 TBT ms"), rows)
    print_claims(
        [
            Claim(
                "offline throughput by PSM, up to",
                "4x",
                f"{max(gains):.2f}x",
                "the questions' share of a prompt sets the bound: (512 + 128) / 128 = 5 here",
            )
        ]
    )


if __name__ == "__main__":
    main(experiment, __doc__, seconds=120.0)
