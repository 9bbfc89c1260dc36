"""The simulator against the engine: the runs of ``bench_coserve.py``, simulated.

    python benchmark/bench_fidelity.py --results results --latency-profile profile.json

Every run of a planning policy is simulated with the same arrivals, lengths,
targets and latency profile, under the production scheduler.  Two things are not
in a profile: what a pass takes beside its batch (scheduling, results, messages: here
the median difference between the passes of a run with ``--record-plans`` and the
profile), and the time a first token spends outside the scheduler (HTTP, tokenizer, client),
which is that of the median request in the runs of ``--calibrate-on``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from coserve_bench.run_record import RunRecord, read_record
from coserve_bench.systems import SYSTEMS
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.metrics import RequestTimeline, SloTargets, latency_report, throughput
from sglang_coserve.profiler import load_profile
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.executor_config import ExecutorConfig, SafepointConfig
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.run import SimulationSetup, Workload, simulate
from sglang_coserve.workload import TraceRequest

MEDIAN_TTFT, TTFT, ITL, TPOT, OFFLINE = FIGURES = (
    *("p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "mean_tpot_ms", "offline_tokens_per_s"),
)
Run = Callable[["Machine", RunRecord], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Machine:
    """What the simulator is told of the engine beside the profile."""

    model: LatencyModel
    executor: ExecutorConfig
    front_end_s: float = 0.0
    """Added to every TTFT."""


def main() -> int:
    """Simulate every run, print measured beside simulated, and write both."""
    parser = argparse.ArgumentParser(description="Simulated against measured runs.")
    parser.add_argument("--results", type=Path, required=True, help="--out of bench_coserve.py")
    parser.add_argument("--latency-profile", type=Path, required=True)
    parser.add_argument("--calibrate-on", default="non-preemptive", metavar="SYSTEM")
    parser.add_argument(
        "--scheduling-ms", type=float, default=2.5, help="of a pass, beside its batch"
    )
    parser.add_argument("--kv-tokens", type=int, default=65536)
    parser.add_argument("--safepoint-layers", type=int, nargs=2, metavar=("INTERVAL", "LAYERS"))
    parser.add_argument("--offline-tokens", type=int, nargs=2, default=(512, 32))
    parser.add_argument("--offline-concurrency", type=int, default=32)
    parser.add_argument(
        "--warmup", type=float, default=10.0, metavar="S", help="both loads, before the window"
    )
    parser.add_argument("--out", type=Path, help="JSON")
    arguments = parser.parse_args()
    records = [
        record
        for path in sorted((arguments.results / "runs").glob("*.json"))
        if SYSTEMS[(record := read_record(path)).key.system].predicts
    ]
    if not records:
        print(f"{arguments.results}/runs holds no run of a planning policy", file=sys.stderr)
        return 2
    known = [record for record in records if record.key.system == arguments.calibrate_on]
    machine = Machine(
        load_profile(arguments.latency_profile).latency_model,
        ExecutorConfig(
            kv_capacity_tokens=arguments.kv_tokens,
            page_tokens=1,
            max_batch_tokens=2048,
            scheduling_s=arguments.scheduling_ms / 1e3,
            safepoint=_safepoint(arguments.safepoint_layers),
        ),
    )
    run = partial(_simulate, arguments)
    machine = calibrate(machine, known or records, run)
    print(f"outside the scheduler: {machine.front_end_s * 1e3:.1f} ms a first token")
    rows = []
    for record in records:
        assert record.offline is not None
        measured = figures(record.online, record.offline.throughput.total_tokens_per_s)
        simulated = run(machine, record)
        rows.append({"run": asdict(record.key), "measured": measured, "simulated": simulated})
        print(
            f"{record.key.name:40}" + "".join(_cell(name, measured, simulated) for name in FIGURES)
        )
    print("\nmedian of |simulated / measured - 1|, all runs:")
    for name in FIGURES:
        errors = [abs(row["simulated"][name] / row["measured"][name] - 1) for row in rows]
        print(
            f"  {name:22} {100 * statistics.median(errors):5.1f}%  worst {100 * max(errors):5.1f}%"
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"label": "simulated", "runs": rows}, indent=1) + "\n")
    return 0


def calibrate(machine: Machine, records: Sequence[RunRecord], run: Run) -> Machine:
    """Return the machine with which the median TTFT of ``records`` comes out right."""
    measured_ms = statistics.mean(figures(record.online)[MEDIAN_TTFT] for record in records)
    simulated_ms = statistics.mean(run(machine, record)[MEDIAN_TTFT] for record in records)
    return replace(machine, front_end_s=max(measured_ms - simulated_ms, 0.0) / 1e3)


def _simulate(
    arguments: argparse.Namespace, machine: Machine, record: RunRecord
) -> dict[str, float]:
    warmup_s = arguments.warmup
    workload = Workload(
        online=partial(_online, record, warmup_s),
        offline=partial(_offline, *arguments.offline_tokens),
        backlog_depth=arguments.offline_concurrency,
        is_closed_loop=True,
        interval_s=warmup_s + record.window_s,
    )
    setup = SimulationSetup(machine.model, machine.executor, _left_to_scheduler(record, machine))
    policy = SYSTEMS[record.key.system].flags[-1]
    result = simulate(workload, setup, make_policy(policy))
    offline = throughput(result.offline, warmup_s, warmup_s + record.window_s)
    counted = [timeline for timeline in result.online if timeline.arrival_s >= warmup_s]
    return figures(counted, offline.total_tokens_per_s, machine.front_end_s)


def _left_to_scheduler(record: RunRecord, machine: Machine) -> SloTargets:
    """Return a run's targets without the part of a TTFT that passes outside the scheduler."""
    targets = record.targets or SloTargets()
    if targets.ttft_s is None:
        return targets
    return replace(targets, ttft_s=max(targets.ttft_s - machine.front_end_s, 1e-3))


def figures(
    online: Sequence[RequestTimeline],
    offline_tokens_per_s: float = math.nan,
    front_end_s: float = 0.0,
) -> dict[str, float]:
    """Return the figures that are compared, by name."""
    report = latency_report(online)
    seconds = (report.ttft.p50_s, report.ttft.p99_s, report.itl.p99_s, report.tpot.mean_s)
    p50_ttft, p99_ttft, p99_itl, mean_tpot = (
        1e3 * (s if s is not None else math.nan) for s in seconds
    )
    return {
        MEDIAN_TTFT: p50_ttft + 1e3 * front_end_s,
        TTFT: p99_ttft + 1e3 * front_end_s,
        ITL: p99_itl,
        TPOT: mean_tpot,
        OFFLINE: offline_tokens_per_s,
    }


def _online(record: RunRecord, warmup_s: float) -> Iterator[SimRequest]:
    """Yield the run's arrivals, and before them, as a warm-up, those of the window's end.

    What arrived before the window is not in the record; without it the window would
    begin with empty queues.
    """
    served = [timeline for timeline in record.online if timeline.token_times_s]
    arrivals = [(timeline.arrival_s, timeline) for timeline in served]
    arrivals += [
        (timeline.arrival_s - record.window_s, timeline)
        for timeline in served
        if timeline.arrival_s >= record.window_s - warmup_s
    ]
    trace = (
        TraceRequest(number, arrival_s + warmup_s, t.prompt_tokens, len(t.token_times_s))
        for number, (arrival_s, t) in enumerate(sorted(arrivals, key=lambda pair: pair[0]))
    )
    return from_trace(trace, RequestClass.ONLINE)


def _offline(prompt_tokens: int, output_tokens: int) -> Iterator[SimRequest]:
    trace = (TraceRequest(number, 0.0, prompt_tokens, output_tokens) for number in range(10**6))
    return from_trace(trace, RequestClass.OFFLINE)


def _safepoint(layers: Sequence[int] | None) -> SafepointConfig | None:
    if layers is None:
        return None
    return SafepointConfig(interval_layers=layers[0], num_layers=layers[1])


def _cell(name: str, measured: dict[str, float], simulated: dict[str, float]) -> str:
    ratio = simulated[name] / measured[name]
    return f"  {name} {measured[name]:7.0f} → {simulated[name]:7.0f} ({ratio:4.2f})"


if __name__ == "__main__":
    sys.exit(main())
