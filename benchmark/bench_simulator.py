"""Iterations a second of the simulator, its own share apart from the scheduler's.

    python benchmark/bench_simulator.py --rows 64

``--rows`` requests decode all the time, half of them offline; then the same with
an event log. The scheduler's share is the time inside ``core``; it is the code
that serves in production, so only the rest is the simulator's. Times are CPU
times: what else runs on the machine does not count.

    python benchmark/bench_simulator.py --trace azure.csv --requests 100000 --policy sarathi coserve

runs as many requests of a trace, one time after the other as often as it takes, as
``coserve simulate`` does, beside an endless offline load.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from sglang_coserve.core.latency_model import RooflineModel, find_hardware
from sglang_coserve.core.latency_model.known_models import find_model
from sglang_coserve.core.offline_queue import OfflineQueue, OfflineQueueConfig
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.simulator import SimulationOptions, simulate
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.event_log import EventLog
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.observer import SimulationObserver
from sglang_coserve.simulator.source import TrafficSource
from sglang_coserve.workload import TraceRequest, fit_to_context, read_trace, scale_rate

PROMPT_TOKENS = 512


CALLS = ("arrived", "add_offline", "plan", "start", "update", "restore", "finish")
"""Of ``Scheduler``, by the simulator."""


class Stopwatch:
    """The CPU time inside of some methods of an object."""

    def __init__(self, watched: object, names: Sequence[str]) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(watched, name, partial(self._timed, getattr(watched, name)))

    def _timed(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        start_s = time.process_time()
        result = method(*arguments, **named)
        self.seconds += time.process_time() - start_s
        return result


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description="Speed of the simulator.")
    parser.add_argument("--rows", type=int, default=64, help="requests that decode")
    parser.add_argument("--iterations", type=int, default=20_000)
    parser.add_argument("--policy", nargs="+", default=["conserve"])
    parser.add_argument("--trace", type=Path, help="time a whole run of this trace instead")
    parser.add_argument("--requests", type=int, default=100_000, help="of the trace")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the trace's rate")
    parser.add_argument("--offline", default="6916x394", help="offline lengths beside the trace")
    arguments = parser.parse_args()
    for policy in arguments.policy:
        if arguments.trace:
            run_trace(arguments, policy)
        else:
            run_requests(arguments, policy)


def run_trace(arguments: argparse.Namespace, policy: str) -> None:
    """Print the CPU time of a run of the trace."""
    options = SimulationOptions(
        offline=arguments.offline, policy=policy, slo_ttft_ms=500.0, slo_tpot_ms=50.0
    )
    fitting, _ = fit_to_context(read_trace(arguments.trace), options.max_context_tokens)
    trace = list(scale_rate(islice(repeated(fitting), arguments.requests), arguments.rate))
    workload = replace(
        options.workload(),
        online=partial(from_trace, trace, RequestClass.ONLINE),
        interval_s=trace[-1].arrival_s,
    )
    setup, fresh = options.setup(policy), make_policy(policy)
    start_s = time.process_time()
    result = simulate(workload, setup, fresh)
    seconds = time.process_time() - start_s
    iterations = result.counters.iterations
    print(
        f"{policy:15} {len(trace):,} requests, {result.end_s:,.0f} simulated s:"
        f" {seconds:6.1f} s of CPU time, {iterations:,} iterations of"
        f" {seconds / iterations * 1e6:5.1f} us",
        flush=True,
    )


def repeated(trace: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Yield the requests of a trace, and again from its end on, for ever."""
    once = list(trace)
    span_s = once[-1].arrival_s
    index = count()
    for number in count():
        for request in once:
            arrival_s = number * span_s + request.arrival_s
            yield replace(request, index=next(index), arrival_s=arrival_s)


def run_requests(arguments: argparse.Namespace, policy: str) -> None:
    """Print the steps a second with all requests decoding."""
    print(f"{arguments.rows} requests, {arguments.iterations} iterations, {policy}")
    for name, observers in (("alone", []), ("with event log", [EventLog(io.StringIO(), {})])):
        total_s, scheduler_s = run(arguments, policy, observers)
        own_s = total_s - scheduler_s
        print(
            f"{name:15}"
            f" {arguments.iterations / total_s:8,.0f} iterations/s in all"
            f" {arguments.iterations / own_s:8,.0f} of the simulator alone"
            f" ({own_s / arguments.iterations * 1e6:5.1f} us, scheduler"
            f" {scheduler_s / arguments.iterations * 1e6:5.1f} us an iteration)"
        )


def run(
    arguments: argparse.Namespace, policy: str, observers: Sequence[SimulationObserver]
) -> tuple[float, float]:
    """Return the seconds of the steps with all requests decoding, and the scheduler's part."""
    model = RooflineModel.from_datasheet(find_model("llama-3.1-8b"), find_hardware("h100"))
    length = PROMPT_TOKENS + 2 * arguments.iterations
    config = ExecutorConfig(
        kv_capacity_tokens=length * (arguments.rows + 1), max_running_requests=arguments.rows
    )
    scheduler = Scheduler(make_policy(policy), model, (), OfflineQueue(OfflineQueueConfig()))
    stopwatch = Stopwatch(scheduler, CALLS)
    offline = arguments.rows // 2
    streams = [
        from_trace(
            [
                TraceRequest(index, 0.0, PROMPT_TOKENS, 2 * arguments.iterations)
                for index in range(count)
            ],
            request_class,
        )
        for request_class, count in (
            (RequestClass.ONLINE, arguments.rows - offline),
            (RequestClass.OFFLINE, offline),
        )
    ]
    executor = SimulatedExecutor(config, model)
    engine = SimEngine(scheduler, executor, TrafficSource(timed=streams), observers)
    while executor.num_decoding < arguments.rows:
        engine.step()
    stopwatch.seconds = 0.0
    start_s = time.process_time()
    for _ in range(arguments.iterations):
        engine.step()
    return time.process_time() - start_s, stopwatch.seconds


if __name__ == "__main__":
    main()
