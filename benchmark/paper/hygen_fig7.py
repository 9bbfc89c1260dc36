"""HyGen Fig. 7: the target as the batch budget, against the budget found by test runs.

    python benchmark/paper/hygen_fig7.py --trace AzureLLMInferenceTrace_conv.csv

The simple strategy takes the mean TBT that is allowed as the latency budget of
every iteration; the profiler searches the budget that gives this mean.
"""

from __future__ import annotations

from harness import Claim, main, print_claims, print_table
from hygen_setting import Bench, offline_per_s, percent_over, tolerance

QPS = 1.5
TOLERANCES = (0.05, 0.1, 0.2, 0.3, 0.5)


def experiment(seconds: float, trace: str | None) -> None:
    """Compare both at several tolerances."""
    bench = Bench.at(QPS, seconds, trace)
    rows: list[tuple[object, ...]] = []
    gaps, gains = [], []
    for part in TOLERANCES:
        slo = tolerance("tbt mean", part)
        (result,) = bench.check(slo).results(bench.alone_report)
        simple = bench.under_budget(result.limit_s)
        profiled = bench.searched(slo)
        if profiled is None:
            continue
        for name, run_result in (("simple", simple), ("profiler", profiled)):
            over = percent_over(bench, slo, run_result)
            rows.append((f"+{100 * part:g}%, {name}", 100 * part, over, offline_per_s(run_result)))
        gaps.append(percent_over(bench, slo, simple) - 100 * part)
        gains.append(offline_per_s(profiled) / max(offline_per_s(simple), 1.0))
    head = ("tolerance, budget", "allowed %", "above online-only %", "offline tok/s")
    print_table("Fig. 7", head, rows)
    low, high = min(gaps), max(gaps)
    print_claims(
        [
            Claim(
                "mean TBT under the simple strategy",
                "misses the target's value",
                f"{low:+.0f} to {high:+.0f} percentage points off",
                "below it: iterations are as long as the budget at most, shorter without work",
            ),
            Claim("offline throughput by the profiler", "higher", f"up to {max(gains):.2f}x"),
        ]
    )


if __name__ == "__main__":
    main(experiment, __doc__, seconds=120.0)
