"""HyGen Fig. 10 and 15: targets and offline throughput over the online load, 5% tolerance.

python benchmark/paper/hygen_fig10_15.py --trace AzureLLMInferenceTrace_conv.csv
"""

from __future__ import annotations

from itertools import pairwise

from harness import Claim, main, print_claims, print_table
from hygen_setting import METRICS, Bench, offline_per_s, percent_over, tolerance

RATES = (0.5, 1.0, 1.5, 2.0, 2.5)
TOLERANCE = 0.05


def experiment(seconds: float, trace: str | None) -> None:
    """Search a budget for every metric at every rate."""
    rows: list[tuple[object, ...]] = []
    kept = 0
    by_rate: list[float] = []
    for rate in RATES:
        bench = Bench.at(rate, seconds, trace)
        for metric in METRICS:
            slo = tolerance(metric, TOLERANCE)
            result = bench.searched(slo)
            if result is None:
                rows.append((f"{rate:g} QPS, {metric}", "no budget keeps it", 0.0))
                continue
            kept += 1
            over = percent_over(bench, slo, result)
            rows.append((f"{rate:g} QPS, {metric}", over, offline_per_s(result)))
            if metric == "tbt p99":
                by_rate.append(offline_per_s(result))
    print_table("Fig. 10 and 15", ("load, metric", "above online-only %", "offline tok/s"), rows)
    falls = all(a >= b for a, b in pairwise(by_rate))
    print_claims(
        [
            Claim(
                "Fig. 10: targets kept at 5%",
                "all",
                f"{kept} of {len(RATES) * len(METRICS)}",
                "TTFT: an arrival waits for the iteration that runs; see hygen_fig3_4.py",
            ),
            Claim(
                "Fig. 15: offline throughput as the load grows, P99 TBT +5%",
                "adjusts to what is left",
                f"{by_rate[0]:,.0f} to {by_rate[-1]:,.0f} tokens/s"
                f"{', falling all the way' if falls else ''}",
            ),
        ]
    )


if __name__ == "__main__":
    main(experiment, __doc__, seconds=120.0)
