"""What our policy makes of a machine whose steps are nearly all fixed cost, as the demo's is.

    python benchmark/bench_fixed_cost.py --out benchmark/results/fixed_cost_sim.json

Simulated, with the latency profile that the demo's server measured of itself: a step with one
decode takes 2.2 ms, and each further one adds 0.07 ms. The online requests are the bundled trace;
offline requests of 240 tokens and 40 to generate never run out, 64 at a time.
Shown are P50 and P99 latencies divided by those of the online requests alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from common.results import write_results
from sglang_coserve.core.control.slo import parse_slo
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.metrics import latency_report
from sglang_coserve.profiler import load_profile
from sglang_coserve.simulator import (
    ExecutorConfig,
    SafepointConfig,
    SimulationSetup,
    Workload,
    simulate,
)
from sglang_coserve.simulator.assemble import offline_requests
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.tables import markdown_table
from sglang_coserve.workload import fit_to_context, read_trace, sample_path

PROFILE: Final = Path(__file__).parent / "results" / "demo_profile_cpu.json"
CONTEXT_TOKENS: Final = 4000
MACHINE: Final = ExecutorConfig(
    kv_capacity_tokens=65536,
    page_tokens=1,
    max_running_requests=4096,
    max_batch_tokens=4096,
    safepoint=SafepointConfig(num_layers=2, interval_layers=1, resume_s=1.6e-3),
    scheduling_s=0.75e-3,
    noise_cv=0.15,
)
"""The demo's flags and model. To resume takes what ``bench_suspension.py`` measured, planning what
``bench_overhead.py`` did; step times in the demo vary by some 15%."""


@dataclass(frozen=True)
class OnlineLatencies:
    """P50 and P99 in seconds, and what offline work got."""

    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    offline_tokens_per_s: float


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    options = parse_options(argv)
    rows, found = [], []
    for seconds in options.seconds:
        for seed in range(options.seeds):
            alone = run(seconds, seed, "online_only", (), has_offline=False)
            for name, slos in targets(alone).items():
                beside = run(seconds, seed, "coserve", slos)
                found.append({"seconds": seconds, "seed": seed, "targets": name, **asdict(beside)})
                ratios = [
                    getattr(beside, field) / getattr(alone, field)
                    for field in ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
                ]
                rows.append(
                    (
                        f"{seconds:g}",
                        str(seed),
                        name,
                        *(f"{ratio:.2f}" for ratio in ratios),
                        f"{beside.offline_tokens_per_s:,.0f}",
                    )
                )
    columns = ("s", "seed", "targets", "TTFT P50", "P99", "gap P50", "P99", "offline tokens/s")
    print(markdown_table(columns, rows))
    write_results(options.out, options, runs=found)
    return 0


def targets(alone: OnlineLatencies) -> dict[str, tuple[str, str]]:
    """Return SLOs by name: the server's default, and limits of 1.2 x the P99s alone."""
    limits = (1.2e3 * alone.ttft_p99_s, 1.2e3 * alone.itl_p99_s)
    return {
        "+10%": ("ttft p99 <= +10%", "tbt p99 <= +10%"),
        "x 1.2": (f"ttft p99 <= {limits[0]:.6f}ms", f"tbt p99 <= {limits[1]:.6f}ms"),
    }


def run(
    seconds: float, seed: int, policy: str, slos: Sequence[str], *, has_offline: bool = True
) -> OnlineLatencies:
    """Simulate the bundled trace for so long."""
    trace = [r for r in read_trace(sample_path("online")) if r.arrival_s < seconds]
    online, _ = fit_to_context(trace, CONTEXT_TOKENS)
    result = simulate(
        Workload(
            online=partial(from_trace, online, RequestClass.ONLINE, seed=seed),
            offline=offline_requests("240x40", max_context_tokens=CONTEXT_TOKENS, seed=seed)
            if has_offline
            else tuple,
            backlog_depth=64 * has_offline,
            is_closed_loop=True,
            interval_s=seconds,
        ),
        SimulationSetup(
            load_profile(PROFILE).latency_model,
            replace(MACHINE, seed=seed),
            slos=tuple(map(parse_slo, slos)),
            scheduler=SchedulerConfig(refine=True, seed=seed),
        ),
        make_policy(policy),
    )
    report = latency_report(result.online)
    return OnlineLatencies(
        known(report.ttft.p50_s),
        known(report.ttft.p99_s),
        known(report.itl.p50_s),
        known(report.itl.p99_s),
        result.offline_throughput.computed_tokens_per_s,
    )


def known(value_s: float | None) -> float:
    """Return a latency that some request had."""
    assert value_s is not None, "no online request had a token"
    return value_s


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, nargs="+", default=[20, 60, 300])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
