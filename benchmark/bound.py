"""The most offline work beside online requests that is possible, and what ``coserve`` does.

    python benchmark/bound.py
    python benchmark/bound.py --trace azure.csv --offline 6916x394

The bound is computed for a load that goes on as in the trace (docs/benchmarks.md says how, and
``upper_bound.py`` why it is one); what stands beside it is simulated with the same latency model:
Llama-3.1-8B on an H100, a roofline from the datasheet. Without a trace there are two, of lognormal
lengths and Poisson arrivals: one with long prompts, one with long outputs. A load of 1 is the rate
at which the no-interference baseline serves requests that all come at once.

Targets are multiples of the baseline's P99 TTFT and P99 gap between tokens: 1.2, told to the
scheduler in milliseconds, and 1.1, told as a slowdown.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Final

from bound_bench.upper_bound import Capacity, OfflineShape, offline_bound, required
from common.arrivals import gamma_arrivals, synthesize
from sglang_coserve.core.control.baseline import Baseline, BaselineRequest
from sglang_coserve.core.control.slo import parse_slo
from sglang_coserve.core.latency_model.operators import kv_capacity_tokens
from sglang_coserve.core.policies.coserve import CoservePolicy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.metrics import SloTargets, latency_report, percentile
from sglang_coserve.simulator.assemble import SimulatedMachine, offline_requests
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.executor_config import ExecutorConfig, SafepointConfig
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import SimulationSetup, Workload, simulate
from sglang_coserve.workload.shape import fit_to_context, scale_rate
from sglang_coserve.workload.trace import TraceRequest, read_trace

LENGTHS: Final = ("2048x64", "256x512")
LOADS: Final = (0.2, 0.5, 0.8)
SEED: Final = 5
SPREAD: Final = 0.6
"""Sigma of the logarithm of a length."""

BACKLOG: Final = 64
LATE_SHARE: Final = 0.01
"""Of the requests, whose targets are P99s."""

MACHINE: Final = SimulatedMachine.named("llama-3.1-8b", "h100")
MODEL: Final = MACHINE.roofline()
EXECUTOR: Final = ExecutorConfig(
    kv_capacity_tokens=kv_capacity_tokens(MACHINE.shape, MACHINE.hardware),
    max_running_requests=256,
    safepoint=SafepointConfig(MACHINE.shape.num_layers),
)


def bound_per_s(requests: Sequence[TraceRequest], targets: SloTargets, lengths: str) -> float:
    """Return the upper bound in tokens/s."""
    capacity = Capacity(
        EXECUTOR.max_batch_tokens, EXECUTOR.max_running_requests, EXECUTOR.kv_capacity_tokens
    )
    online = required(requests, targets, late_share=LATE_SHARE)
    offline = OfflineShape(*map(int, lengths.split("x")))
    return offline_bound(MODEL, capacity, offline, online, requests[-1].arrival_s)


def simulated(
    requests: Sequence[TraceRequest], targets: SloTargets, slos: Sequence[str], lengths: str
) -> SimulationResult:
    """Return what ``coserve`` does."""
    workload = Workload(
        online=partial(from_trace, requests, RequestClass.ONLINE),
        offline=offline_requests(lengths, max_context_tokens=10**6),
        backlog_depth=BACKLOG,
        interval_s=requests[-1].arrival_s,
    )
    setup = SimulationSetup(MODEL, EXECUTOR, targets, slos=tuple(map(parse_slo, slos)))
    return simulate(workload, setup, CoservePolicy())


def main() -> None:
    """Print a row for each trace, load and kind of target."""
    arguments = parse()
    print(
        f"offline {arguments.offline}, {EXECUTOR.kv_capacity_tokens:,} KV tokens, tokens/s;"
        " coserve is simulated\n"
        "trace      load  target   TTFT ms  gap ms |  bound   simulated  share |"
        " P99 TTFT, gap / target  on time %"
    )
    for name, trace in traces(arguments):
        for load in [1.0] if arguments.trace else LOADS:
            requests = list(scale_rate(trace, load))
            times = alone_times(requests)
            ttft_s = percentile([times[str(r.index)][0] - r.arrival_s for r in requests], 99)
            gap_s = percentile([b - a for each in times.values() for a, b in pairwise(each)], 99)
            for kind, factor in (("x1.2", 1.2), ("+10%", 1.1)):
                targets = SloTargets(factor * ttft_s, factor * gap_s)
                found = row(requests, targets, kind, arguments.offline)
                print(f"{name:10} {load:4g}  {kind:6} {found}", flush=True)


def row(requests: Sequence[TraceRequest], targets: SloTargets, kind: str, lengths: str) -> str:
    """Return the bound beside what is simulated."""
    ttft_s, gap_s = targets.ttft_s or 0.0, targets.tpot_s or 0.0
    slos = [
        f"{latency} p99 <= {kind if kind.startswith('+') else f'{seconds * 1e3:.6f}ms'}"
        for latency, seconds in (("ttft", ttft_s), ("tbt", gap_s))
    ]
    bound = bound_per_s(requests, targets, lengths)
    result = simulated(requests, targets, slos, lengths)
    offline = result.offline_throughput.computed_tokens_per_s
    report = latency_report(result.online)
    on_time = [
        all(
            time_s <= timeline.arrival_s + ttft_s + number * gap_s
            for number, time_s in enumerate(timeline.token_times_s)
        )
        for timeline in result.online
    ]
    return (
        f"{ttft_s * 1e3:9,.1f} {gap_s * 1e3:7.1f} | {bound:6,.0f} {offline:11,.0f}"
        f" {offline / bound:6.2f} | {(report.ttft.p99_s or 0) / ttft_s:14.2f}"
        f" {(report.itl.p99_s or 0) / gap_s:7.2f} {100 * sum(on_time) / len(on_time):10.1f}"
    )


def traces(arguments: argparse.Namespace) -> Iterator[tuple[str, list[TraceRequest]]]:
    """Yield the traces with their names; made ones at a load of 1."""
    if arguments.trace:
        fitting, _ = fit_to_context(read_trace(arguments.trace), EXECUTOR.kv_capacity_tokens)
        yield arguments.trace.stem[:10], list(islice(fitting, arguments.requests))
        return
    for lengths in LENGTHS:
        made = list(draw(lengths, arguments.requests))
        burst = [TraceRequest(r.index, 0.0, r.prompt_tokens, r.output_tokens) for r in made]
        end_s = max(times[-1] for times in alone_times(burst).values())
        yield lengths, list(scale_rate(made, len(made) / end_s))


def draw(lengths: str, count: int) -> Iterator[TraceRequest]:
    """Yield requests with lognormal lengths around those named, and Poisson arrivals."""
    medians = [int(part) for part in lengths.split("x")]
    rng = random.Random(SEED)
    pairs = (
        tuple(max(1, int(rng.lognormvariate(math.log(median), SPREAD))) for median in medians)
        for _ in range(count)
    )
    return synthesize(gamma_arrivals(1.0, 1.0, SEED), pairs)  # type: ignore[arg-type]


def alone_times(requests: Sequence[TraceRequest]) -> dict[str, list[float]]:
    """Return when the baseline has each token of each request."""
    baseline: Baseline[BaselineRequest] = Baseline(EXECUTOR.engine_size)
    times: dict[BaselineRequest, list[float]] = {}
    for request in requests:
        one = BaselineRequest(
            arrival_s=request.arrival_s,
            prompt_left_tokens=request.prompt_tokens,
            known_tokens=request.output_tokens,
        )
        times[one] = []
        baseline.arrived(one)
        baseline.ended(one)
    for step in baseline.advance(MODEL.predict, math.inf):
        for one in (*step.decoded, *step.first):
            times[one].append(step.end_s)
    return {str(r.index): its for r, its in zip(requests, times.values(), strict=True)}


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="as it comes; default: two made ones")
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--offline", default="2048x256", help="lengths of an offline request")
    return parser.parse_args()


if __name__ == "__main__":
    main()
