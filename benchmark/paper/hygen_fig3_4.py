"""HyGen Fig. 3 and 4: interference kept within tolerances, and what it leaves to offline work.

    python benchmark/paper/hygen_fig3_4.py --trace AzureLLMInferenceTrace_conv.csv

Llama-2-7B on one A100 of 40 GB, Azure's conversation trace sampled to 1.5 requests a
second, arXiv-like offline requests. HyGen*: Sarathi++ with offline requests at a
fixed rate, the largest that keeps the target.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from harness import Claim, gamma_arriving, main, print_claims, print_table, run
from hygen_setting import (
    ARXIV,
    CHUNK_TOKENS,
    METRICS,
    Bench,
    offline_per_s,
    percent_over,
    tolerance,
)

from sglang_coserve.core.policies.sarathi import SarathiPolicy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.simulator import SimulationResult

QPS = 1.5
TOLERANCES = (0.05, 0.1, 0.2, 0.3)


def at_offline_rate(bench: Bench, seconds: float, rate_per_s: float) -> SimulationResult:
    """Run Sarathi++ with offline requests as a Poisson process."""
    offline = gamma_arriving(rate_per_s, 1.0, ARXIV, seconds, request_class=RequestClass.OFFLINE)
    return run(
        replace(bench.workload, offline=offline, backlog_depth=0),
        bench.setup,
        SarathiPolicy(CHUNK_TOKENS),
    )


def experiment(seconds: float, trace: str | None) -> None:
    """Run four metrics at four tolerances."""
    bench = Bench.at(QPS, seconds, trace)
    alone = bench.alone.online_throughput.total_tokens_per_s
    sarathi = run(bench.workload, bench.setup, SarathiPolicy(CHUNK_TOKENS))
    rows: list[tuple[object, ...]] = []
    cells: tuple[object, ...]
    total, gain, kept = [], [], []
    for metric in METRICS:
        slo = tolerance(metric, TOLERANCES[0])
        over = percent_over(bench, slo, sarathi)
        rows.append((f"{metric}, Sarathi++", "-", over, offline_per_s(sarathi)))
        for part in TOLERANCES:
            slo = tolerance(metric, part)
            limited = bench.searched(slo)
            star = bench.largest(partial(at_offline_rate, bench, seconds), slo, 0.01, 10.0)
            name = f"{metric} +{100 * part:g}%"
            for system, result in (("HyGen", limited), ("HyGen*", star)):
                cells = ("no budget keeps it", 0.0)
                if result is not None:
                    cells = (percent_over(bench, slo, result), offline_per_s(result))
                rows.append((f"{name}, {system}", 100 * part, *cells))
            kept.append(limited is not None)
            if limited is not None:
                total.append((offline_per_s(limited) + alone) / alone)
                if star is not None and offline_per_s(star):
                    gain.append(offline_per_s(limited) / offline_per_s(star))
    head = ("metric, system", "tolerance %", "above online-only %", "offline tok/s")
    print_table("Fig. 3 and 4", head, rows)
    print_claims(
        [
            Claim(
                "targets that some budget keeps",
                "all",
                f"{sum(kept)} of {len(kept)}",
                "an arrival waits for the iteration that runs, which a budget cannot make shorter "
                "than online prefills need",
            ),
            Claim("total throughput against online alone, up to", "3.87x", f"{max(total):.2f}x"),
            Claim(
                "offline throughput against HyGen*, up to",
                "5.84x",
                f"{max(gain):.2f}x",
                "depends on the share of the capacity that the online load takes",
            ),
        ]
    )


if __name__ == "__main__":
    main(experiment, __doc__, seconds=120.0)
