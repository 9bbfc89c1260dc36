"""HyGen Fig. 14: offline throughput under the same P99 TBT target with worse predictors.

    python benchmark/paper/hygen_fig14.py --trace AzureLLMInferenceTrace_conv.csv

A worse predictor believes other costs than the machine has: each coefficient of
the roofline is off by a seeded random factor. The budget is searched for each,
as a deployment would.
"""

from __future__ import annotations

import math
import random

from harness import Claim, main, print_claims, print_table
from hygen_setting import MACHINE, Bench, offline_per_s, percent_over, tolerance

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.latency_model import LatencyModel, coefficients, with_coefficients

QPS = 1.5
SPREADS = (0.0, 0.05, 0.1, 0.2, 0.4)
BATCHES = [
    BatchStats.of([(tokens, context)] if tokens else [], [context] * rows)
    for tokens in (0, 64, 256, 512)
    for context in (256, 1024, 3000)
    for rows in (1, 8, 24)
]


def wrong(model: LatencyModel, spread: float, seed: int = 5) -> LatencyModel:
    """Return the model with every coefficient off by a lognormal factor."""
    rng = random.Random(seed)
    return with_coefficients(
        model,
        {
            name: value * math.exp(rng.gauss(0, spread))
            for name, value in coefficients(model).items()
        },
    )


def experiment(seconds: float, trace: str | None) -> None:
    """Search the budget with each predictor."""
    true = MACHINE.roofline()
    slo = tolerance("tbt p99", 0.05)
    rows: list[tuple[object, ...]] = []
    throughputs = []
    for spread in SPREADS:
        believed = wrong(true, spread)
        errors = [abs(believed.predict(b) / true.predict(b) - 1) for b in BATCHES]
        mape = 100 * sum(errors) / len(errors)
        bench = Bench.at(QPS, seconds, trace, believed)
        result = bench.searched(slo)
        if result is None:
            rows.append((f"MAPE {mape:.1f}%", "no budget keeps it", 0.0))
            throughputs.append(0.0)
            continue
        throughputs.append(offline_per_s(result))
        rows.append((f"MAPE {mape:.1f}%", percent_over(bench, slo, result), throughputs[-1]))
    print_table("Fig. 14", ("predictor", "P99 TBT above online-only %", "offline tok/s"), rows)
    print_claims(
        [
            Claim(
                "offline throughput with the worst predictor, of the best one's",
                "robust",
                f"{min(throughputs) / throughputs[0]:.0%}",
            )
        ]
    )


if __name__ == "__main__":
    main(experiment, __doc__, seconds=120.0)
